"""SkyRL's inference server without Ray: `python -m tests.gpu.sync_server`, with vLLM's arguments of a server."""

import sys

from beam_rl.servers import find_moved_modules

if __name__ == "__main__":
    find_moved_modules()
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import main

    main(sys.argv[1:])
