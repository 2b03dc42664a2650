"""Write deployments/monitoring/dashboard.json, which Grafana imports.

python -m scripts.dashboard          # rewrite it
python -m scripts.dashboard --check  # exit 1 if it is out of date
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[1] / "deployments" / "monitoring" / "dashboard.json"

Queries = tuple[tuple[str, str], ...]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """A picture of some expressions, each with its legend; `@` in them is the job's matcher."""

    title: str
    about: str
    unit: str
    queries: Queries
    stat: bool = False
    stacked: bool = False


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}{{@}}[$__rate_interval]))"


def _share(part: str, whole: str) -> str:
    of = f"sum(rate({whole}[$__rate_interval]))"
    # 0 while nothing happens.
    return f"sum(rate({part}[$__rate_interval])) / clamp_min({of}, 1e-9)"


def _quantiles(name: str) -> Queries:
    buckets = f"sum by (le) (rate({name}_bucket{{@}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))


def _rates(*named: tuple[str, str]) -> Queries:
    return tuple((f"sum(rate({name}{{@}}[$__rate_interval]))", legend) for name, legend in named)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Engines", "Engines that take new work, by role.", "short",
              (("sum by (role) (conserve_replicas{@})", "{{role}}"),), stat=True),
        Panel("Conversations", "Live histories of conversations.", "short",
              (("sum(conserve_conversations{@})", "live"),), stat=True),
        Panel("Waiting", "Conversations that wait for a decoder with room.", "short",
              (("sum(conserve_queue_length{@})", "waiting"),), stat=True),
        Panel("KV occupancy", "KV held for live conversations, of all there is.", "percentunit",
              (("sum(conserve_decoder_held_tokens{@}) / sum(conserve_decoder_capacity_tokens{@})",
                "occupancy"),), stat=True),
        Panel("Failed turns", "Share of the turns that ended.", "percentunit",
              ((_share('conserve_turns_total{@, outcome="failed"}', "conserve_turns_total{@}"),
                "failed"),), stat=True),
        Panel("Table", "1: the conversation table answers scrapes.", "short",
              (("min(conserve_table_up{@})", "answers"),), stat=True),
    ),
    "Conversations": (
        Panel("Conversations by phase", "Live histories: a turn runs (reasoning), none does "
              "(acting), or bound nowhere (paused); and conversations that wait for room.", "short",
              (("sum by (phase) (conserve_conversations{@})", "{{phase}}"),
               ("sum(conserve_queue_length{@})", "waiting")), stacked=True),
        Panel("Waiting, by reason", "No decoder has room, the window admits no more, or others go "
              "first.", "short", (("sum by (why) (conserve_waiting{@})", "{{why}}"),)),
        Panel("Pauses and restores", "Idle histories that gave up their room, and paused ones that "
              "came back, per second.", "ops",
              ((_rate("conserve_pauses_total", "reason"), "paused: {{reason}}"),
               (_rate("conserve_restores_total", "where"), "back: {{where}}"))),
    ),
    "Latency": (
        Panel("TTFT", "Time to first token of streamed turns.", "s",
              _quantiles("conserve_ttft_seconds")),
        Panel("TTFET", "Time to first effective token: from a conversation's first request to the "
              "first token meant for the user.", "s", _quantiles("conserve_ttfet_seconds")),
        Panel("TBT", "Time between tokens of streamed turns.", "s",
              _quantiles("conserve_tbt_seconds")),
        Panel("Wait for placement", "Time that new conversations waited for a decoder with room.",
              "s", _quantiles("conserve_queue_wait_seconds")),
        Panel("Stages, p90", "Time in each stage on the decoder; stages but decode are known only "
              "under engine_scheduler: conversation_lane.", "s",
              (("histogram_quantile(0.9, sum by (le, stage) "
                "(rate(conserve_stage_seconds_bucket{@}[$__rate_interval])))", "{{stage}}"),)),
        Panel("Turn latency", "From the request's arrival to its last byte.", "s",
              _quantiles("conserve_turn_latency_seconds")),
        Panel("Turns, by outcome", "Turns that ended, per second.", "ops",
              ((_rate("conserve_turns_total", "outcome"), "{{outcome}}"),), stacked=True),
    ),
    "KV cache": (
        Panel("KV occupancy, by engine", "KV held for live conversations, of the engine's space.",
              "percentunit",
              (("conserve_decoder_held_tokens{@} / conserve_decoder_capacity_tokens{@}",
                "{{decoder}}"),)),
        Panel("Handoffs", "Prompts that decoders took from LMCache, and what went wrong with "
              "those, per second.", "ops",
              _rates(("conserve_handoffs_total", "handoffs"),
                     ("conserve_late_handoffs_total", "late"),
                     ("conserve_missed_handoffs_total", "missed"),
                     ("conserve_cold_prefill_failures_total", "prefill failed"))),
        Panel("Cache hits", "Prompt tokens that were not computed, of all.", "percentunit",
              ((_share('conserve_tokens_total{@, kind="cached"}',
                       'conserve_tokens_total{@, kind=~"cached|computed"}'), "any cache"),
               (_share("conserve_decoder_cached_tokens_total{@}",
                       "conserve_prompt_tokens_total{@}"), "the engine's own"))),
        Panel("KV space, by use", "Token-seconds per second: what decoders' KV space is used for.",
              "short", ((_rate("conserve_cost_token_seconds_total", "term"), "{{term}}"),),
              stacked=True),
        Panel("Computed again", "Prompt tokens per second that were computed although their "
              "history had them before; and moves to another decoder.", "short",
              _rates(("conserve_recomputed_tokens_total", "tokens"),
                     ("conserve_moves_total", "moves"),
                     ("conserve_stream_moves_total", "streams that went on elsewhere"))),
        Panel("Parked", "Tokens of KV in host memory, from where histories can come back.", "short",
              (("sum(conserve_parked_tokens{@})", "parked"),)),
    ),
    "Engines": (
        Panel("Engines, by role", "Engines that take new work, that leave, and that are wanted.",
              "short", (("sum by (role) (conserve_replicas{@})", "{{role}}"),
                        ("sum by (role) (conserve_leaving_replicas{@})", "{{role}}, leaving"),
                        ("sum by (role) (conserve_wanted_replicas{@})", "{{role}}, wanted"))),
        Panel("Engines lost", "Engines found dead, in the last ten minutes.", "short",
              (("sum by (role) (increase(conserve_engines_lost_total{@}[10m]))", "{{role}}"),)),
        Panel("Prefills left", "Prompt tokens that each engine still has to compute.", "short",
              (("conserve_engine_prefill_tokens{@}", "{{engine}}"),)),
        Panel("Decodes", "Requests past their first token, by engine.", "short",
              (("conserve_engine_decodes{@}", "{{engine}}"),)),
        Panel("GPU power", "Power of each board; none on CPUs.", "watt",
              (("conserve_gpu_power_watts{@}", "{{gpu}}"),)),
        Panel("Versions", "The application that runs.", "short",
              (("conserve_build_info{@}", "ConServe {{version}}, vLLM {{vllm}}, LMCache "
                "{{lmcache}}, Ray {{ray}}: {{model}}"),)),
    ),
    "Tenants": (
        Panel("Tokens, by tenant", "Prompt tokens computed or cached, and output tokens, per "
              "second. Without keys there is one tenant, without a name.", "short",
              ((_rate("conserve_tokens_total", "tenant, kind"), "{{tenant}} {{kind}}"),),
              stacked=True),
        Panel("Refusals", "For lack of room, and at tenants' limits, per second.", "ops",
              ((_rate("conserve_queue_refusals_total", "reason"), "{{reason}}"),
               (_rate("conserve_tenant_refusals_total", "tenant, limit"),
                "{{tenant}}: {{limit}}"))),
        Panel("Held tokens, by tenant", "KV held for conversations.", "short",
              (("sum by (tenant) (conserve_tenant_held_tokens{@})", "{{tenant}}"),)),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": heading, "collapsed": False, "gridPos": place})
        y += 1
        width, height = (4, 4) if row[0].stat else (8, 8)
        for number, panel in enumerate(row):
            place = {"x": number * width % _COLUMNS, "y": y, "w": width, "h": height}
            panels.append(_panel(panel, place))
            if place["x"] + width == _COLUMNS or number == len(row) - 1:
                y += height
    return {
        "title": "ConServe",
        "uid": "conserve",
        "tags": ["conserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATA_SOURCE, _JOB]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


_DATA_SOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}
_JOB = {
    "name": "job",
    "label": "Job",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(conserve_build_info, job)", "refId": "job"},
    "refresh": 2,
    "multi": True,
    "includeAll": True,
}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _SOURCE,
            "expr": expression.replace("@", 'job=~"$job"'),
            "legendFormat": legend,
        }
        for number, (expression, legend) in enumerate(panel.queries)
    ]
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    if panel.stat:
        options, custom = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "auto"}, {}
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": options,
        "targets": targets,
    }


def main() -> int:
    wanted = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return int(not DASHBOARD.exists() or DASHBOARD.read_text() != wanted)
    DASHBOARD.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
