"""A package that stands for LightLLM's: its processes, the modules that the hook changes, and what
`service` reads. Not a line of it is LightLLM's; the names are."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "server/api_server.py": """
import dataclasses, multiprocessing, os

@dataclasses.dataclass
class StartArgs:
    model_dir: str
    multimodal: bool

def add_cli_args(parser):
    parser.add_argument("--model_dir")
    parser.add_argument("--multimodal", action="store_true")

def launch_server(args):
    os.environ["STAND_IN"] = args.model_dir
    os.environ["STAND_IN_MULTIMODAL"] = "yes" if args.multimodal else ""
    from lightllm.server.multi_level_kv_cache.manager import start_manager
    from lightllm.server.router.manager import start_router
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    processes = [
        spawn.Process(target=start, args=(pipe[1],))
        for start, pipe in zip((start_manager, start_router), pipes)
    ]
    for process, pipe in zip(processes, pipes):
        process.start()
        pipe[1].close()  # so that a process that dies is an EOFError here
    try:
        serve(*(pipe[0] for pipe in pipes), processes)
    finally:
        for process in processes:
            process.kill()

def serve(manager, router, processes):
    hashes = list(range(1, 9))
    for number in (1, 2):
        manager.send(hashes)
        pages = manager.recv()
        router.send((hashes, pages))
        print(f"request {number}: found {len(pages)}, wrote {router.recv()}", flush=True)
    manager.send(None)
    print("pins, ignored:", manager.recv())
    for pipe, process in zip((manager, router), processes):
        pipe.send(())
        process.join()
        assert process.exitcode == 0
""",
    "server/multi_level_kv_cache/cpu_cache_client.py": """
class CpuKvCacheClient:
    def __init__(self, only_create_meta_data, init_shm_data):
        raise AssertionError("the stand-in's own client was made")
""",
    "server/multi_level_kv_cache/manager.py": """
from .cpu_cache_client import CpuKvCacheClient

class MultiLevelKVCacheManager:
    def __init__(self):
        self.cpu_cache_client = CpuKvCacheClient(only_create_meta_data=True, init_shm_data=True)

    def _cpu_cache_match(self, token_hash_list):
        raise AssertionError("page by page")

def start_manager(pipe):
    manager = MultiLevelKVCacheManager()
    while (hashes := pipe.recv()) != ():
        if hashes is None:
            pipe.send(manager.cpu_cache_client.collect())
        else:
            pipe.send(manager._cpu_cache_match(hashes))
    manager.cpu_cache_client.close()
""",
    "server/router/manager.py": '''
import multiprocessing

def start_router(pipe):
    """Starts a rank, as a child of a child, and carries its messages."""
    from lightllm.server.router.model_infer.mode_backend.multi_level_kv_cache import start_rank
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    rank = spawn.Process(target=start_rank, args=(its,))
    rank.start()
    its.close()
    while (order := pipe.recv()) != ():
        ours.send(order)
        pipe.send(ours.recv())
    ours.send(())
    rank.join()
    assert rank.exitcode == 0
''',
    "server/router/model_infer/mode_backend/multi_level_kv_cache.py": """
from types import SimpleNamespace
from lightllm.server.multi_level_kv_cache.cpu_cache_client import CpuKvCacheClient

class MultiLevelKvCacheModule:
    def __init__(self):
        self.cpu_cache_client = CpuKvCacheClient(only_create_meta_data=False, init_shm_data=False)

    def load_cpu_cache_to_reqs(self, reqs):
        client = self.cpu_cache_client
        held = client.cache.check().pins  # before the manager hears that it has them back
        for req in reqs:
            pages = req.shm_req.cpu_cache_match_page_indexes.get_all()
            for page in pages:
                assert (client.cpu_kv_cache_tensor[page] == page).all()
            client.deref_pages(page_list=pages)
        return held

def listed(items):
    return SimpleNamespace(get_all=lambda: items)

def start_rank(pipe):
    rank = MultiLevelKvCacheModule()
    client = rank.cpu_cache_client
    assert client.cpu_kv_cache_tensor.shape == (client.page_num, 2, 16, 4, 8)
    assert client.kv_cache_tensor_meta.page_num == 64
    while (order := pipe.recv()) != ():
        hashes, pages = order
        of = SimpleNamespace()
        of.token_hash_list, of.cpu_cache_match_page_indexes = listed(hashes), listed(pages)
        held = rank.load_cpu_cache_to_reqs([SimpleNamespace(shm_req=of)])
        assert held >= 2 * len(pages), held  # of the manager, and of this process
        written, ready = client.allocate_pages(hashes, disk_offload_enable=False)
        for page, is_ready in zip(written, ready):
            if not is_ready:
                client.cpu_kv_cache_tensor[page] = page
        client.update_pages_status_to_ready(page_list=written, deref=True)
        pipe.send(len(hashes) - sum(ready))
    client.close()
""",
    "utils/envs_utils.py": """
import os

def get_env_start_args():
    multimodal = bool(os.environ["STAND_IN_MULTIMODAL"])
    return {
        "model_dir": os.environ["STAND_IN"], "cpu_cache_token_page_size": 16, "data_type": "fp32",
        "enable_multimodal": multimodal,
    }

def get_unique_server_name():
    return os.environ["STAND_IN_SERVICE"]
""",
    "utils/kv_cache_utils.py": """
from types import SimpleNamespace

def calcu_cpu_cache_meta():
    return SimpleNamespace(
        page_num=64, layer_num=2, token_page_size=16, num_heads=4, data_type="torch.float32",
        get_merged_head_dim=lambda: 8, calcu_one_page_size=lambda: 2 * 16 * 4 * 8 * 4,
    )
""",
}


def make(folder: Path) -> None:
    """Write the package into a folder, which goes on the path."""
    for name, text in FILES.items():
        path = folder / "lightllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for inside in (folder / "lightllm").rglob("*"):
        if inside.is_dir():
            (inside / "__init__.py").touch()
    (folder / "lightllm" / "__init__.py").touch()
