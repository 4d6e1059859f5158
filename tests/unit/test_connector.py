"""`prefix` for models of transformers: the same answers as without a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.connecting import (  # noqa: E402
    SECRET,
    cache,
    connector,
    llama,
    ready,
    save,
)
from support.refusals import refused  # noqa: E402
from support.scripts import with_support  # noqa: E402
from support.tiny_models import answer, assert_same, kept, model, prompt  # noqa: E402

from lightcache import Cache, ConfigError  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402

__all__ = ["cache", "connector", "llama"]

pytestmark = pytest.mark.models

PAGE = 16


# ---- answers


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 70])
def test_answers_are_those_without_a_cache(
    cache: Cache, connector: lct.Connector, llama: Any, length: int
) -> None:
    ids = prompt(length)
    expected = answer(llama, ids)
    for turn in range(2):
        with connector.prefix(ids) as past:
            assert past.reused == ((length - 1) // PAGE * PAGE if turn else 0)
            assert_same(answer(llama, ids, past), expected)
    assert cache.stats().ready == length // PAGE


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of their own": ("Llama", {"num_key_value_heads": 4}),
    "one head": ("Llama", {"num_key_value_heads": 1}),
    "normed heads of another size": ("Qwen3", {"head_dim": 16}),
    "biased": ("Qwen2", {}),
    "experts": ("Mixtral", {"num_local_experts": 2, "sliding_window": None}),
    "latents": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(segment_name: str, kind: str) -> None:
    name, sizes = KINDS[kind]
    made, ids = model(name, **sizes), prompt(40)
    expected = answer(made, ids)
    with lct.open_cache(
        made, name=segment_name, pages=8, secret=SECRET, lifetime="attached"
    ) as cache:
        for reused in (0, 32):
            with lct.prefix(cache, made, ids) as past:
                assert past.reused == reused
                assert_same(answer(made, ids, past), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_restored_bytes_are_those_saved(segment_name: str, dtype: torch.dtype) -> None:
    made, ids = model(dtype=dtype), prompt(50)
    with lct.open_cache(
        made, name=segment_name, pages=8, secret=SECRET, lifetime="attached"
    ) as cache:
        with lct.Connector(cache, made) as connector:
            with connector.prefix(ids) as past:
                answer(made, ids, past)
            saved = kept(past, 48)
            with connector.prefix(ids) as past:
                restored = kept(past, 48)
    assert [one.dtype for one in restored] == [dtype] * 4
    assert all(torch.equal(a, b) for a, b in zip(saved, restored, strict=True))


OTHER_PROCESS = """
import sys
from support.tiny_models import answer, model, prompt
from lightcache.connectors import transformers as lct

made, ids = model(), prompt(70)
how = {"pages": 32, "secret": bytes(16), "lifetime": "attached"}
with lct.open_cache(made, name=sys.argv[1], **how) as cache:
    with lct.prefix(cache, made, ids) as past:
        print(past.reused, answer(made, ids, past).tokens.tolist()[0])
"""


def test_another_process_finds_it(
    cache: Cache, connector: lct.Connector, llama: Any, script: Callable[..., Any]
) -> None:
    save(connector, llama, prompt(70))
    done = script(with_support(OTHER_PROCESS), cache.name)
    expected = answer(llama, prompt(70)).tokens.tolist()[0]
    assert done.stdout.strip() == f"64 {expected}", done.stderr


def test_threads_share_a_connector(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    prompts = [torch.cat([prompt(33), prompt(20, seed)], dim=1) for seed in range(4)]
    expected = [answer(llama, ids).tokens for ids in prompts]
    wrong: list[int] = []

    def requests(at: int) -> None:
        for turn in range(3):
            number = (at + turn) % 4
            with connector.prefix(prompts[number]) as past:
                found = answer(llama, prompts[number], past).tokens
            if not torch.equal(found, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=requests, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.stats().ready == 2 + 4


# ---- tokens


FORMS: dict[str, Callable[[Any], Any]] = {
    "list": lambda ids: ids[0].tolist(),
    "list of one row": lambda ids: ids.tolist(),
    "tuple": lambda ids: tuple(ids[0].tolist()),
    "range": lambda ids: range(40),
    "array": lambda ids: ids[0].numpy(),
    "small array": lambda ids: ids[0].numpy().astype(np.uint8),
    "array of one row": lambda ids: ids.numpy(),
    "tensor": lambda ids: ids[0],
    "int32 tensor": lambda ids: ids.int(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tokens(cache: Cache, connector: lct.Connector, llama: Any, form: str) -> None:
    ids = torch.arange(40)[None]
    with connector.prefix(FORMS[form](ids)) as past:
        answer(llama, ids, past, steps=1)
    assert ready(cache, ids) == 2
    with connector.prefix(ids) as past:
        assert past.reused == 32


def test_tokens_are_copied(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(40)
    given = ids[0].numpy().copy()
    with connector.prefix(given) as past:
        given[:] = 0
        answer(llama, ids, past, steps=1)
    assert ready(cache, ids) == 2


def test_no_tokens(connector: lct.Connector) -> None:
    with connector.prefix([]) as past:
        assert (past.reused, past.held, len(past.tokens)) == (0, 0, 0)


BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "rows": (torch.zeros((2, 8), dtype=torch.long), r"of shape \(n,\) or \(1, n\), found int64"),
    "ragged rows": ([[1, 2], [3]], "expected ids of one prompt"),
    "three dimensions": (np.zeros((1, 1, 4), int), "each row of a batch"),
    "a number": (7, "expected ids of one prompt"),
    "text": ("hello", "expected ids of one prompt"),
    "texts": (["a", "b"], "expected whole numbers"),
    "fractions": ([0.5], "expected whole numbers, found float64"),
    "truths": ([True], "expected whole numbers, found bool"),
    "negative": ([1, -1] * 20, "token 1 is -1, expected 0 to"),
    "nothing": (None, "expected ids of one prompt"),
}


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
def test_bad_tokens(connector: lct.Connector, tokens: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with connector.prefix(tokens):
            pytest.fail("entered")


def test_extend_refuses_what_was_not_computed(connector: lct.Connector, llama: Any) -> None:
    ids = prompt(20)
    with connector.prefix(ids) as past:
        refused(ConfigError, "0 computed, so expected at most 0 more, found 1", past.extend, [1])
        out = answer(llama, ids, past, steps=5).tokens
        refused(ConfigError, "at most 5 more, found 25; give only the gen", past.extend, out)
        with pytest.raises(ConfigError, match="expected ids of one prompt"):
            past.extend(torch.zeros((2, 2), dtype=torch.long))
        past.extend(out[:, 20:])
        refused(ConfigError, "at most 0 more", past.extend, [1])
