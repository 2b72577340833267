"""The rollout's servers before they are started."""

import subprocess
import sys
from pathlib import Path

import pytest
from skyrl.backends.skyrl_train.inference_servers.common import SERVER_PORT_STRIDE

from beam_rl import servers


def test_two_runs_on_a_host_have_ports_of_their_own(tmp_path: Path) -> None:
    """Three runs that started together once trained on one of their three engines."""
    first, held = servers.port_windows(1, tmp_path)
    second, _one = servers.port_windows(1, tmp_path)
    assert second - first == servers.SERVER_PORTS == SERVER_PORT_STRIDE
    held[0].release()
    several, _three = servers.port_windows(3, tmp_path)
    assert several == second + SERVER_PORT_STRIDE
    assert servers.port_windows(1, tmp_path)[0] == first, "ranges that were too few for three were not given back"


def test_the_ports_are_the_hosts_whatever_a_runs_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run has a TMPDIR of its own, which once hid the runs from each other."""
    found = []
    for name in ("one", "other"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr("tempfile.tempdir", None)
        (tmp_path / name).mkdir()
        found.append(servers.port_windows(1))
    assert found[0][0] != found[1][0]


def test_a_run_that_was_killed_leaves_its_ports_to_others(tmp_path: Path) -> None:
    take = "import os, sys; from pathlib import Path; from beam_rl import servers; "
    take += "print(servers.port_windows(1, Path(sys.argv[1]))[0], flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", take, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(servers.port_windows(1, tmp_path)[0])


def test_what_vllm_has_moved_is_found_where_skyrl_looks_for_it(monkeypatch) -> None:
    """SkyRL 0.4.0 imports a module that vLLM 0.33 has elsewhere."""
    monkeypatch.setitem(servers.MOVED, "vllm.no_such_module", "json")
    monkeypatch.delitem(sys.modules, "vllm.no_such_module", raising=False)
    servers.find_moved_modules()
    assert sys.modules.pop("vllm.no_such_module").__name__ == "json"
