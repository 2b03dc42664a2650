"""Models that share GPUs: what one lacks, and when another one gives up engines."""

import pytest

from autoscale.autoscaler import Autoscaler, Limits, Others, make_autoscaler
from conserve.placement import Decoder
from conserve.settings import SettingsError, load
from conserve.wire import NO_LACK, Lack

START_S = 40.0


def model(replicas: int, least: int = 1, gpus: float = 1.0) -> Autoscaler:
    """A model with as many engines as it wants, which it has had for long."""
    limits = Limits(least, 4, down_delay_s=600, cool_down_s=600)
    autoscaler = Autoscaler({"decoder": limits}, {"decoder": replicas}, None, 30, gpus=gpus)
    autoscaler.pays_after_s = START_S
    return autoscaler


def decoders(*held_tokens: int) -> list[Decoder]:
    return [Decoder(f"d{n}", 10_000, held, conversations=1) for n, held in enumerate(held_tokens)]


def decided(
    autoscaler: Autoscaler,
    lack: Lack,
    used_tokens: float = 0.0,
    leaving: int = 0,
    now_s: float = 1000.0,
    waiting_tokens: float = 0.0,
    held: tuple[int, ...] = (8_000, 8_000),
) -> int:
    others = Others(lack, used_tokens, {"decoder": leaving})
    autoscaler.decide(decoders(*held), [], waiting_tokens, now_s, others)
    return autoscaler.replicas("decoder")


def test_engines_whose_histories_are_idle_go_to_a_model_that_lacks_gpus() -> None:
    """Though they are full of them; without a lack all stays."""
    autoscaler = model(2)
    autoscaler.decide(decoders(8_000, 8_000), [], 0, 1000.0)
    assert autoscaler.replicas("decoder") == 2
    assert decided(autoscaler, Lack(1.0)) == 1
    scaling = autoscaler.wanted["decoder"].scaling
    assert scaling.given
    assert "another model lacks GPUs" in scaling.why


@pytest.mark.parametrize(
    ("replicas", "least", "lack", "used_tokens", "kept"),
    [
        (4, 1, 1.0, 0.0, 3),  # No more than others lack.
        (4, 2, 9.0, 0.0, 2),  # Never below the least.
        (4, 1, 9.0, 13_000.0, 2),  # What is in use stays, at the usual utilisation.
        (2, 1, 1.0, 15_000.0, 2),  # All of it is in use.
        (1, 1, 1.0, 0.0, 1),
    ],
)
def test_no_more_is_given_than_is_lacked_and_idle(
    replicas: int, least: int, lack: float, used_tokens: float, kept: int
) -> None:
    held = (9_000,) * replicas
    assert decided(model(replicas, least), Lack(lack), used_tokens, held=held) == kept


def test_engines_have_as_many_gpus_as_their_models_say() -> None:
    assert decided(model(4, gpus=2.0), Lack(3.0), held=(9_000,) * 4) == 2


def test_what_is_on_its_way_out_is_not_given_twice() -> None:
    assert decided(model(3), Lack(1.0), leaving=1, held=(9_000,) * 3) == 3


def test_an_engine_that_is_new_is_kept_for_as_long_as_its_start_took() -> None:
    autoscaler = model(1)
    autoscaler.decide(decoders(8_900), [], 4_000, 1000.0)
    assert autoscaler.replicas("decoder") == 2
    kept = [decided(autoscaler, Lack(1.0), now_s=1000.0 + after) for after in (1, START_S - 1)]
    assert kept == [2, 2]
    assert decided(autoscaler, Lack(1.0), now_s=1000.0 + START_S) == 1


def test_a_model_that_queues_itself_gives_nothing_and_gets_nothing_before_what_is_owed() -> None:
    autoscaler = model(2)
    assert decided(autoscaler, Lack(1.0), waiting_tokens=4_000) == 3
    busy = model(2)
    # Another model has fewer engines than it has in any case: this comes before all work.
    assert decided(busy, Lack(1.0, 1.0), 16_000.0, waiting_tokens=4_000) == 1
    for now_s in (1001.0, 1100.0):
        assert decided(busy, Lack(1.0, 1.0), 16_000.0, now_s=now_s, waiting_tokens=4_000) == 1
    busy.decide(decoders(8_000), [], 4_000, 1200.0)
    assert busy.replicas("decoder") == 2


def test_idle_histories_keep_engines_get_no_more_and_lack_nothing() -> None:
    idle, full = model(2), (9_900, 9_900)
    assert decided(idle, NO_LACK, 0.0, held=full) == 2
    assert decided(model(2), NO_LACK, 18_000.0, held=full) == 3
    # It wanted more while it used what it had.
    idle.adopt("decoder", 3, 1001.0)
    assert decided(idle, NO_LACK, 0.0, now_s=1002.0, held=full) == 3
    for now_s in (1002.0, 1050.0):
        idle.lack({"decoder": 2}, 0, now_s)
    assert idle.lacks == NO_LACK


def test_a_model_lacks_what_does_not_start_in_time() -> None:
    autoscaler = model(3)
    assert decided(autoscaler, NO_LACK, 20_000.0, now_s=0.0, held=(20_000,)) == 3

    def lacks(there: int, starting: int, now_s: float) -> Lack | None:
        autoscaler.lack({"decoder": there}, starting, now_s)
        return autoscaler.lacks

    assert lacks(1, 0, 0.0) == lacks(1, 0, 29.0) == NO_LACK
    assert lacks(1, 0, 30.0) == Lack(2.0)
    assert lacks(1, 1, 31.0) == Lack(1.0)
    assert lacks(0, 0, 32.0) == Lack(3.0, 1.0)
    assert lacks(1, 2, 33.0) == NO_LACK
    # From then on time counts anew.
    assert lacks(1, 0, 40.0) == NO_LACK


def test_an_engine_has_the_gpus_of_its_workers() -> None:
    decoders = {"replicas": 2, "engine": {"tensor_parallel_size": 2}}
    one = make_autoscaler(load({"decoders": decoders, "prefillers": 0}))
    one.lack({"decoder": 1}, 0, 0.0)
    one.lack({"decoder": 1}, 0, 60.0)
    # Decoders do not scale here, so what is missing is owed.
    assert one.lacks == Lack(2.0, 2.0)


@pytest.mark.parametrize(
    "given",
    [
        {"share_gpus": True},
        {"share_gpus": True, "decoders.max_replicas": 3},
        {"share_gpus": True, "models": {"a": {"model": "embedded"}, "b": {"model": "embedded"}}},
    ],
)
def test_sharing_without_anything_to_share_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        load(given)
    (line,) = refused.value.problems
    assert line == "share_gpus: for several models; give some of them max_replicas"


def test_each_model_knows_that_it_shares() -> None:
    models = {"a": {"decoders": {"replicas": 1, "max_replicas": 2}}, "b": {"model": "embedded"}}
    settings = load({"share_gpus": True, "models": models})
    assert [own.share_gpus for own in settings.each.values()] == [True, True]
