import json
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from conserve.capacity import measure
from conserve.capacity.fit import DecodePoint, PrefillPoint
from conserve.capacity.measure import MeasureError
from conserve.capacity.profile import load_profile
from conserve.capacity.profiling import _median, make_grid, profiling
from deployments.messages import TURN1_TOKENS


@settings(max_examples=50, deadline=None)
@given(
    longest=st.integers(1024, 300_000),
    capacity=st.integers(20_000, 1_000_000),
    batch=st.integers(4, 256),
)
def test_what_is_measured_fits_the_engine_and_makes_a_curve(
    longest: int, capacity: int, batch: int
) -> None:
    grid = make_grid(longest, capacity, batch)
    assert len(grid.cold) >= 4
    assert max(grid.cold) <= longest
    assert all(new + cached <= longest for new, cached in grid.appends)
    assert all(count <= batch and count * context <= capacity for count, context in grid.decodes)
    assert len({new for _, _, new, _ in grid.beside}) >= 3
    assert all(new + cached <= longest for *_, new, cached in grid.beside)
    assert len({count * context for count, context in grid.decodes}) >= 3
    assert all(count <= batch for count, *_ in grid.beside)
    assert len(grid.handoffs) >= 2


def test_an_engine_with_short_prompts_has_no_curve() -> None:
    with pytest.raises(MeasureError, match="prompts of up to 900 tokens are too short"):
        make_grid(900, 100_000, 8)


def test_repeated_points_are_one_with_the_median_time() -> None:
    points = [PrefillPoint(128, 0, seconds) for seconds in (0.3, 0.1, 9.0)]
    assert _median(points) == PrefillPoint(128, 0, 0.3)
    assert _median([DecodePoint(1, 2, 0.5)]) == DecodePoint(1, 2, 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:{port}"], "nothing answers at http://127.0.0.1:"),
        (["http://127.0.0.1:{port}", "--vocabulary", "7"], "give two token ids, as in 1000:4000"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_no_file(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with socket.socket() as taken:
        # Bound and not listening: connections are refused.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        filled = [argument.format(port=port) for argument in arguments]
        done = CliRunner().invoke(profiling, [*filled, "--out", str(tmp_path / "p.json")])
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_appends_are_asked_for_as_live_turns_are() -> None:
    assert measure._TURN1_TOKENS == TURN1_TOKENS


def test_fits_are_drawn(tmp_path: Path) -> None:
    from conserve.capacity.pictures import draw_fits

    profile = load_profile("a40-qwen3-0.6b")
    draw_fits(profile, tmp_path / "empty.png")
    points = {
        "prefill": [
            {"new_tokens": n, "cached_tokens": c, "seconds": profile.prefill.seconds(n, c)}
            for n in (128, 1024)
            for c in (0, 4000)
        ],
        "decode": [
            {"sequences": b, "kv_tokens": b * k, "seconds": profile.decode.step_s(b, b * k)}
            for b in (1, 4)
            for k in (128, 1024)
        ],
        "handoff": [{"tokens": n, "seconds": profile.handoff.seconds(n)} for n in (128, 1024)],
    }
    measured = profile.model_copy(update={"points": json.loads(json.dumps(points))})
    draw_fits(measured, tmp_path / "full.png")
    empty, full = (tmp_path / f"{name}.png" for name in ("empty", "full"))
    assert full.read_bytes().startswith(b"\x89PNG")
    assert full.stat().st_size > empty.stat().st_size
