"""The board and the alerts in deploy/monitoring: what they name is served by `lightcache metrics`,
promtool takes every expression, and each alert fires for what it says and not before."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.keys import keys
from support.packages import need

from lightcache import Cache
from lightcache.manager.stats import NodeCounters
from lightcache.tools.metrics import PORT
from lightcache.tools.node_metrics import NodeMetrics

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
OWN = {"up", "ALERTS"}
"""Prometheus's own."""
NAME = re.compile(r"\b(?:lightcache_\w+|up|ALERTS)\b")
LABELS = re.compile(r"\b(lightcache_\w+)\{([^}]*)\}")
VARIABLES = {"$__rate_interval": "5m", "$cache": ".*", "$model": ".*"}
OF_PROMETHEUS = {"instance", "job"}


def board():
    return json.loads((FOLDER / "grafana" / "lightcache.json").read_text())


def alerts():
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return group["rules"]


def expressions():
    panels = [
        (panel["title"], target["expr"])
        for panel in board()["panels"]
        for target in panel.get("targets", ())
    ]
    return panels + [(rule["alert"], rule["expr"]) for rule in alerts()]


def without_variables(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.fixture
def served(segment_name):
    """Samples of a cache that has everything: labels by name."""
    how = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    with Cache.create(segment_name, **how, eviction="hz", kv_groups=("kv",)) as cache:
        cache.pool.prefault()
        with cache.reserve(keys(1)) as new:
            new.publish()
        with NodeCounters.open(cache) as counters:
            counters.add(requests=1)
            registry = CollectorRegistry()
            registry.register(NodeMetrics([segment_name]))
            page = generate_latest(registry).decode()
    labels = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels.items())
    return labels


def test_every_metric_is_served(served):
    for title, expression in expressions():
        names = set(NAME.findall(expression)) - OWN
        assert names or title in ("Alerts", "LightcacheNotScraped"), title
        assert names <= served.keys(), title


def test_every_label_and_value_is_served(served):
    for title, expression in expressions():
        for name, matchers in LABELS.findall(expression):
            for label, sign, value in re.findall(r'(\w+)(=~?)"([^"]*)"', matchers):
                known = {of for of, _ in served[name]}
                assert label in known, (title, name, label)
                if sign == "=":
                    assert (label, value) in served[name], (title, name, value)
        by = {label for found in re.findall(r"by \(([^)]*)\)", expression)
              for label in re.split(r",\s*", found)}  # fmt: skip
        names = set(NAME.findall(expression)) - OWN
        known = {label for name in names for label, _ in served[name]} | OF_PROMETHEUS
        assert by <= known, (title, by - known)


def test_the_board():
    made = board()
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"]
    assert {variable["name"] for variable in made["templating"]["list"]} == {
        "datasource", "cache", "model",
    }  # fmt: skip


def test_the_files_name_each_other():
    """The compose file mounts what is there, and the exporter's port is the one that is scraped."""
    compose = yaml.safe_load((FOLDER / "compose.yml").read_text())
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).is_file(), source
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "an image without a version"
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == [f"127.0.0.1:{PORT}"]
    assert scraped["rule_files"] == ["alerts.yml"]
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    assert f"--port {PORT}" in (FOLDER / "compose.yml").read_text()


def promtool(*arguments):
    need("promtool")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_files():
    promtool("check", "config", FOLDER / "prometheus.yml")


def test_prometheus_takes_every_expression(tmp_path):
    rules = [
        {"record": f"panel:{i}", "expr": without_variables(expression)}
        for i, (_, expression) in enumerate(expressions())
    ]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", path)


# ---- when alerts fire: series of one minute each, as promtool has them

CACHE = 'cache="c",model_name="m",instance="n"'
STORIES = {
    "LightcacheNotScraped": [('up{job="lightcache",instance="n"}', "0x90", "1x90")],
    "LightcacheUnreadable": [(f'lightcache_up{{part="host",{CACHE}}}', "0x90", "1x90")],
    "LightcacheErrors": [(f"lightcache_errors_total{{{CACHE}}}", "0+60x90", "0+1x90")],
    "LightcacheCopiesFail": [
        (f'lightcache_failed_transfers_total{{direction="load",{CACHE}}}', "0+10x90", "0+1x90"),
        (f'lightcache_transfers_total{{direction="load",{CACHE}}}', "0+90x90", "0+90x90"),
    ],
    "LightcacheLockHeld": [
        (f'lightcache_lock_wait_seconds_total{{tier="host",{CACHE}}}', "0+60x90", "0+1x90")
    ],
    "LightcacheStorageFails": [
        (f'lightcache_unstored_pages_total{{cause="failed",{CACHE}}}', "0+1x90", "7x90")
    ],
    "LightcacheNoRoom": [
        (f'lightcache_unwritten_pages_total{{cause="no_room",{CACHE}}}', "0+120x90", "0+6x90")
    ],
    "LightcacheThrashes": [
        (f'lightcache_eviction_idle_seconds_bucket{{tier="host",le="32.0",{CACHE}}}',
         "0+90x90", "0+1x90"),
        (f'lightcache_eviction_idle_seconds_bucket{{tier="host",le="128.0",{CACHE}}}',
         "0+95x90", "0+2x90"),
        (f'lightcache_eviction_idle_seconds_bucket{{tier="host",le="+Inf",{CACHE}}}',
         "0+100x90", "0+100x90"),
    ],
}  # fmt: skip


def test_each_alert_has_a_story_and_says_what_to_do():
    assert [rule["alert"] for rule in alerts()] == list(STORIES)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["for"]
        assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize("fires", [True, False], ids=["fault", "well"])
def test_alerts(tmp_path, fires):
    """With the fault each fires, after its time and not at once; without it none does."""
    tests = []
    for alert, series in STORIES.items():
        firing = [{"exp_labels": labels(alert), "exp_annotations": {}}] if fires else []
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": bad if fires else good} for name, bad, good in series
                ],
                "alert_rule_test": [
                    {"eval_time": "2m", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "89m", "alertname": alert, "exp_alerts": firing},
                ],
            }
        )
    rules = tmp_path / "alerts.yml"  # without texts, which would be here once more
    plain = [{**rule, "annotations": {}} for rule in alerts()]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": plain}]}))
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    promtool("test", "rules", path)


def labels(alert):
    """Of the series of its story that its expression keeps."""
    (rule,) = [rule for rule in alerts() if rule["alert"] == alert]
    name = STORIES[alert][0][0]
    found = dict(re.findall(r'(\w+)="([^"]*)"', name))
    by = re.search(r"by \(([^)]*)\)", rule["expr"])
    if by:
        kept = set(re.split(r",\s*", by[1])) - {"le"}
        found = {label: value for label, value in found.items() if label in kept}
    return {**found, **rule["labels"]}
