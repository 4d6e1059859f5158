"""Commands, options, URLs and make targets of the documents exist, and can be typed as they stand.
test_documents runs the Python blocks."""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.disks import disk

from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.sglang.rank import Options as SglangOptions
from lightcache.connectors.vllm.options import Options as VllmOptions
from lightcache.errors import ConfigError
from lightcache.storage import StorageSpec
from lightcache.storage.urls import GROUP, REMOTE, check_url, schemes
from lightcache.tools import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
URL = re.compile(rf"\b(?:{'|'.join(schemes())}):[^\s`'\"]*")
PLACEHOLDERS = {"NAME": "llama", "URL": "memory:", "FOLDER": ".", "DIR": ".", "N": "1"}


def text(document: str) -> str:
    """The text of a document, without the backslash that tables need before a bar."""
    return (ROOT / document).read_text().replace("\\|", "|")


def blocks(document: str) -> Iterator[str]:
    """The shell blocks, and the blocks without a language."""
    for language, block in FENCED.findall(text(document)):
        if language in ("", "sh"):
            yield block.replace("\\\n", " ")


def spans(document: str) -> list[str]:
    """The inline code."""
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", text(document)))


def commands() -> Iterator[tuple[str, str]]:
    """(document, command line) of all `lightcache ...`."""
    for document in DOCUMENTS:
        lines = [line for block in blocks(document) for line in block.splitlines()]
        for line in [*lines, *spans(document)]:
            if re.match(r"lightcache [a-z]+\b", line):
                yield document, line


@pytest.mark.parametrize(("document", "line"), list(commands()))
def test_commands_can_be_typed(document: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other runs may have caches of the placeholder's model here; of several none is chosen.
    monkeypatch.setattr("lightcache.tools.image.list_segments", list)
    words = shlex.split(line.replace("--url ...", "--url URL").replace("...", ""), comments=True)
    for word in re.findall(r"\S*[?&|;*]\S*", line.split(" #")[0]):
        assert word[0] + word[-1] in ("''", '""'), f"a shell reads {word} in its own way: quote it"
    name, arguments = words[1], [PLACEHOLDERS.get(word, word) for word in words[2:]]
    command = cli.group.get_command(click.Context(cli.group), name)
    assert command is not None, name
    expected = [param for param in command.params if isinstance(param, click.Argument)]
    if not arguments or arguments[0].startswith("-"):  # as in `lightcache dump --json`
        arguments = ["llama" for argument in expected if argument.required] + arguments
    with contextlib.suppress(click.MissingParameter):  # it is about one option
        command.make_context(name, arguments)


def test_options_in_passing() -> None:
    known = {"--version", "--help", "--lightcache"}  # the last: of connectors.lightllm
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        assert command is not None
        known |= {
            option for param in command.params for option in param.opts + param.secondary_opts
        }
    for document in DOCUMENTS:
        shown = {
            option
            for span in spans(document)
            for option in re.findall(r"(?<!\S)--[a-z-]+(?!\w)", span)
        }
        assert shown - known == set(), document


def test_urls() -> None:
    seen = set()
    for document in DOCUMENTS:
        for block in [*blocks(document), *spans(document)]:
            for url in URL.findall(block):
                if re.search(r"\.\.\.|URL|^s3:\w|//$|:$", url):
                    continue  # as in `stack:URL|URL`; a right; a scheme alone
                check_url(url)
                seen.add(url.partition(":")[0])
    assert seen >= {"disk", "memory", "mooncake", "redis", "rediss", "s3", "stack"}


@pytest.mark.parametrize(
    ("scheme", "examples"),
    [
        ("memory", ["memory:?{}"]),
        ("disk", ["disk:/x?{}"]),
        ("redis", ["redis://host?{}", "rediss://host?{}", "redis:/run/redis.sock?{}"]),
        ("s3", ["s3://bucket?{}"]),
        ("mooncake", ["mooncake://host?{}"]),
        ("stack", ["stack:?{}|memory:|memory:"]),
        ("flaky", ["flaky:{}:memory:"]),
    ],
)
def test_the_guide_has_all_options(scheme: str, examples: list[str]) -> None:
    known: set[str] = set()
    for example in examples:
        with pytest.raises(ConfigError) as refused:
            check_url(example.format("nonesuch=1"))
        (options,) = re.findall(r"expected (.*), found", str(refused.value))
        known |= set(re.findall(r"\w+", options)) - {"and", "or"}
    guide = text("docs/guides/storage.md")
    (table,) = re.findall(rf"^\| option of `{scheme}:.*?\n\n", guide, re.DOTALL | re.MULTILINE)
    rows = [row.split("` |")[0] for row in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"(\w+)=", row)} == known


def test_the_documents_have_all_schemes() -> None:
    (sentence,) = re.findall(r"^There are (.*)\.$", text("docs/guides/storage.md"), re.MULTILINE)
    named = set(re.findall(r"`(\w+):`", sentence))
    assert named | set(REMOTE) == set(schemes())
    for scheme in named - {"valkey"}:
        assert re.search(rf"^\| `{scheme}:", text("docs/storage.md"), re.MULTILINE), scheme


def test_the_entry_point() -> None:
    (block,) = re.findall(r"```ini\n(.*?)```", text("docs/guides/storage.md"), re.DOTALL)
    config = configparser.ConfigParser()
    config.read_string(block)
    assert re.fullmatch(r"mine = [\w.]+:\w+", config["options.entry_points"][GROUP].strip())


def test_which_folder_has_which_index(tmp_path: Path) -> None:
    (line,) = re.findall(r"^printf .*$", text("docs/storage.md"), re.MULTILINE)
    with disk(tmp_path) as one, disk(tmp_path, spec=StorageSpec(8192, "other")) as other:
        command = ["sh", "-c", line.replace("/mnt/nvme/cache", str(tmp_path))]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert sorted(shown.stdout.split()) == sorted((one.index_name, other.index_name))


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (*DOCUMENTS, "CONTRIBUTING.md"):
        shown = [
            *spans(document),
            *(line for block in blocks(document) for line in block.splitlines()),
        ]
        for line in shown:
            for word in re.findall(r"^make ([a-z -]*)", line):
                assert set(word.split()) <= targets, (document, line)


def test_benchmarks_that_readme_lists() -> None:
    import lightcache_bench as bench

    (line,) = re.findall(r"^lightcache bench index .*also: (.*)$", text("README.md"), re.MULTILINE)
    assert {"index", *line.split(", ")} == set(bench.names())


def test_sections_of_the_design_that_sources_name() -> None:
    listed = subprocess.run(
        ["git", "grep", "-hoE", r"design/[a-z]+\.md,? (section )?[0-9]+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a clone")
    for page, number in re.findall(r"(design/\w+\.md),? (?:section )?(\d+)", listed.stdout):
        assert f"\n## {number}. " in text(f"docs/{page}"), (page, number)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if "docs/design" in path])
def test_sections_of_the_design_are_numbered_once_and_short(document: str) -> None:
    page = text(document)
    assert len(page.splitlines()) < 500
    pages = [text(other) for other in DOCUMENTS if "docs/design" in other]
    for number in re.findall(r"^## (\d+)\. ", page, re.MULTILINE):
        assert sum(other.count(f"\n## {number}. ") for other in pages) == 1
    numbers = {n for other in pages for n in re.findall(r"^## (\d+)\. ", other, re.MULTILINE)}
    assert set(re.findall(r"\bsections? (\d+)", page)) <= numbers


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_fit(document: str) -> None:
    lines = text(document).splitlines()
    long = [line for line in lines if len(line) > 118 and not line.startswith(("|", "!["))]
    assert not long


PATHS = {
    "docs/design/manager.md": ("## The walk of a `plan`", "## What the parts do"),
}
_PLACE = re.compile(r"`(_?[A-Z]\w*)(?:\.(\w+))?`[^`.;]{0,3}\(?(?:in )?`([\w/]+\.py)`")


@pytest.mark.parametrize("document", PATHS)
def test_paths_through_the_code_name_what_is_there(document: str) -> None:
    """Each `Class.method` (`file.py`) of a walk is a method of that class in such a file."""
    begin, end = PATHS[document]
    path = text(document).partition(begin)[2].partition(end)[0]
    sources = [
        each for top in ("lightcache", "kernels", "shm") for each in (ROOT / top).rglob("*.py")
    ]
    places = _PLACE.findall(" ".join(path.split()))
    assert len(places) > 5
    for kind, method, name in places:
        found = [each.read_text() for each in sources if str(each).endswith(f"/{name}")]
        bodies = [body for each in found for body in re.split(r"^(?=class )", each, flags=re.M)]
        own = [body for body in bodies if re.match(rf"class {kind}\b", body)]
        assert own, f"no class {kind} in {name}"
        assert not method or any(f"def {method}(" in body for body in own), f"{kind}.{method}"


def test_the_way_to_the_disk_names_what_is_there() -> None:
    """Each class and method of a step is in one of the files beside it."""
    steps = [
        [cell.strip() for cell in line.split("|")[2:4]]
        for line in text("docs/design/path.md").splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    assert len(steps) == 12
    for step, files in steps:
        folder, bodies = Path(), []
        for name in re.findall(r"`([\w/]+\.py)`", files):
            path = Path(name) if "/" in name else folder / name
            folder = path.parent
            bodies += re.split(r"^(?=class )", (ROOT / path).read_text(), flags=re.M)
        for kind, method in re.findall(r"`(_?[A-Z]\w*)(?:\.(\w+))?`", step):
            own = [body for body in bodies if re.match(rf"class {kind}\b", body)]
            assert own, f"no class {kind} in {files}"
            assert not method or any(f"def {method}(" in body for body in own), f"{kind}.{method}"


@pytest.mark.parametrize(
    ("document", "options"),
    [("docs/guides/vllm.md", VllmOptions), ("docs/guides/sglang.md", SglangOptions)],
)
def test_options_of_engines_and_their_defaults(document: str, options: type[EngineOptions]) -> None:
    found = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text(document), re.MULTILINE))
    assert set(found) == {each.name for each in dataclasses.fields(options)}
    for each in dataclasses.fields(options):
        said = re.fullmatch("`(.*)`", found[each.name])
        if said is not None:  # others are none, or found out
            assert json.loads(said[1]) == each.default, each.name
        else:
            assert each.default in (None, ()), each.name
