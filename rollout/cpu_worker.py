"""Routed-expert capture on vLLM's CPU runner.

vLLM 0.32 joins the capture to its second model runner only, which needs Triton. Scheduler, buffers and store do not
depend on the runner, so this module joins them to the first one: before a step the connector learns what is scheduled,
and with the sampled tokens the rows that the step's forward captured go out. Scheduling is synchronous on the CPU.
"""

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo

# First: on the CPU this module prepares shared memory before torch is used.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
from vllm.config import CompilationMode
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from beam_rl.rollout import quick_capture


class CapturingModelRunner(CPUModelRunner):
    """CPU model runner that returns routed experts where the engine was asked for them."""

    _connector: AuxOutputWorkerConnector | None = None
    _scheduled: SchedulerOutput

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self._connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(  # type: ignore[override]  # vLLM's decorator hides the method's type, here and below
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        if self._connector is not None:
            self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
            self._scheduled = scheduler_output
        execute: Any = super().execute_model
        return execute(scheduler_output, intermediate_tensors)

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | None:
        sample: Any = super().sample_tokens
        if self._connector is None or self.execute_model_state is None:
            return sample(grammar_output)
        # Requests in the order of the forward's rows, read before sampling moves the batch on.
        requests = list(self.input_batch.req_ids)
        rows = np.array([self._scheduled.num_scheduled_tokens[request] for request in requests])
        batch: Any = SimpleNamespace(
            req_ids=requests,
            query_start_loc_np=np.concatenate(([0], np.cumsum(rows))),
            num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(requests)].copy(),
        )
        pending = self._connector.prepare_output(batch)
        output = sample(grammar_output)
        if pending is not None:
            sampled = np.array([len(output.sampled_token_ids[output.req_id_to_index[r]]) for r in requests])
            pending.enqueue_cpu_copy(sampled, num_rejected=np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class BeamCPUWorker(CPUWorker):
    """vLLM's CPU worker with the capturing runner."""

    def init_device(self) -> None:
        quick_capture.install(self.vllm_config)
        super().init_device()
        # Linux wants AMX to be asked for. vLLM's kernels do not ask, so without this the first step kills the process
        # unless it is large enough for PyTorch to have asked.
        torch.cpu._init_amx()
        if self.compilation_config.mode == CompilationMode.NONE:
            # An eager engine still compiles a helper of the sampler: half a minute of C++ at the first log-prob.
            torch._dynamo.config.disable = True
        # vLLM names its runner's class inside init_device; a runner holds no weights yet, so replacing it is cheap.
        if not self.use_v2_model_runner:
            self.model_runner = CapturingModelRunner(self.vllm_config, torch.device("cpu"))
