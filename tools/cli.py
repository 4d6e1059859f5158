"""Entry points. A command's module is imported when the command runs, not for `--help`."""

from __future__ import annotations

import importlib

import click

import lightcache

# name: (module in this package, summary)
COMMANDS = {
    "ls": ("ls", "List all segments of this machine."),
    "top": ("top", "Watch the caches: hits, room, transfers, clients, warnings."),
    "metrics": ("metrics", "Serve the caches' metrics to Prometheus."),
    "events": ("events", "Publish which pages a cache has, for routers."),
    "dump": ("dump", "Show the content of a cache, without touching it."),
    "explain": ("explain", "Say why a prompt hits a cache, or does not."),
    "check": ("check", "Derive every invariant of a cache again, from a copy."),
    "create": ("create", "Create a cache and give it its memory."),
    "rm": ("maintenance", "Remove a cache, its pool and its counters."),
    "reap": ("maintenance", "Release what dead clients held."),
    "repair": ("maintenance", "Rebuild everything that is derived from the records."),
    "disable": ("maintenance", "Make every lookup and reservation fail, immediately."),
    "enable": ("maintenance", "Undo `disable`."),
    "sweep": ("maintenance", "Remove unused segments and pools."),
    "vllm-config": ("vllm_config", "Print the line that switches the cache on for vLLM."),
    "replay": ("replay", "What caches of other sizes would serve of a trace."),
    "storage": ("storage_service", "Serve a cache with a storage, for all of its processes."),
    "config": ("settings", "Show what an operator can set, and where it is set."),
    "doctor": ("doctor", "Examine this machine, and recommend changes."),
    "demo": ("demo", "A router and model workers share one cache."),
    "bench": ("bench", "Run a benchmark."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and summary; imports a command's module when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"lightcache.tools.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command takes --help, and those that show something take --json. "
    "Exit status: 0 done, 1 something is broken, 2 it could not be done.",
)
@click.version_option(lightcache.__version__, prog_name="lightcache")
def group() -> None:
    """Inspect and maintain the KV caches in this machine's shared memory."""


def main() -> None:
    """Entry point of `lightcache`."""
    group(prog_name="lightcache")
