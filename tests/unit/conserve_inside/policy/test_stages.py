"""Encodes and prefills in one lane, and the SMs of decodes beside them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve_inside.policy import DecodeShare, PrefillLane, Stage, Stages

BUDGET_TOKENS = 256
# Nova, section V-A5: S*, S_min and d.
SHARES: dict[Stage, DecodeShare] = {
    "encode": DecodeShare(24, 12, 4),
    "prefill": DecodeShare(30, 12, 6),
}
MOST_PREFILLS = 4


def route(stages: Stages, name: str, tokens: int = 1_000, decoding: bool = True) -> str:
    return stages.route(name, tokens, BUDGET_TOKENS, decoding, 0.0)


# --- Shares ---------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 50), st.integers(0, 100))
def test_decodes_have_fewer_sms_the_more_is_pending(
    least_sms: int, more_sms: int, per_request_sms: int, pending: int
) -> None:
    share = DecodeShare(least_sms + more_sms, least_sms, per_request_sms)
    sms = share.decode_sms(pending)
    assert share.least_sms <= sms <= share.most_sms
    assert share.decode_sms(pending + 1) <= sms
    assert share.decode_sms(0) == share.decode_sms(1) == share.most_sms


def test_a_stage_without_a_share_leaves_decodes_to_others() -> None:
    stages = Stages(PrefillLane(), {"encode": SHARES["encode"]})
    assert stages.decode_sms() is None
    stages.encodes("a")
    assert stages.decode_sms() == 24
    stages.encoded()
    stages.takes("b", 1_000)
    assert stages.decode_sms() is None


# --- The lane -------------------------------------------------------------------------------------


def test_beside_an_image_a_long_prompt_waits_for_the_lane_though_nothing_decodes() -> None:
    stages = Stages(PrefillLane())
    assert route(stages, "text", decoding=False) == "inline"
    stages.wants("image")
    assert route(stages, "text", decoding=False) == "lane"
    stages.encodes("image")
    assert route(stages, "text", decoding=False) == "wait"
    assert route(stages, "short", BUDGET_TOKENS, decoding=False) == "inline"


def test_prefills_do_not_wait_for_an_encode_that_has_no_room() -> None:
    stages = Stages(PrefillLane())
    stages.wants("image")
    for number in range(2 * MOST_PREFILLS):
        name = f"text {number}"
        if number >= MOST_PREFILLS:
            assert stages.next_encode() == "image"
            stages.puts_off()
        assert route(stages, name) == "lane"
        stages.takes(name, 1_000)
        stages.prefills.ends(name, "done")


@dataclass
class Call:
    """A call as the scheduler knows it; without images left, its prompt can be prefilled."""

    name: str
    images: int
    tokens: int


class Scheduling(RuleBasedStateMachine):
    """Runs calls with and without images through the stages, as a scheduler does."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = Stages(PrefillLane(most_waiting=5, longest_wait_s=20.0), SHARES)
        # In the order of their arrival, which is that of each stage, too.
        self.calls: list[Call] = []
        self.arrived = 0
        self.now_s = 0.0
        # Prefills that entered the lane one after another while images waited.
        self.passed = 0

    @property
    def need_images(self) -> list[str]:
        return [call.name for call in self.calls if call.images]

    @property
    def idle(self) -> bool:
        return self.stages.current is None

    def leaves(self, call: Call) -> None:
        self.calls.remove(call)
        self.stages.forget(call.name)
        self.stages.prefills.forget(call.name)

    @rule(images=st.integers(0, 2), tokens=st.sampled_from([100, 1_000, 5_000]))
    def arrives(self, images: int, tokens: int) -> None:
        call = Call(f"call-{self.arrived}", images, tokens)
        self.arrived += 1
        self.calls.append(call)
        if images:
            self.stages.wants(call.name)

    @rule(prompts=st.integers(2, 8))
    def long_prompts_arrive(self, prompts: int) -> None:
        for _ in range(prompts):
            self.arrives(0, 1_000)

    @rule(decoding=st.booleans(), lasted_s=st.floats(0, 3))
    def steps(self, decoding: bool, lasted_s: float) -> None:
        """Begin every call that can, and then an encode: prefills go first."""
        self.now_s += lasted_s
        for name in reversed(self.need_images):
            # The scheduler looks at its calls again in each step, in any order.
            self.stages.wants(name)
        refused = []
        for call in [call for call in self.calls if not call.images]:
            if call.name == self.stages.prefills.current:
                continue
            was_encoding, was_idle = self.stages.encoding is not None, self.idle
            where = self.stages.route(call.name, call.tokens, BUDGET_TOKENS, decoding, self.now_s)
            if where == "lane":
                assert was_idle
                assert not was_encoding
                assert not refused, "a later call had the lane before an earlier one"
                self.stages.takes(call.name, call.tokens)
                self.passed = self.passed + 1 if self.need_images else 0
            elif where == "wait":
                refused.append(call.name)
                assert call.tokens > BUDGET_TOKENS
            else:
                self.leaves(call)
        begins = self.stages.next_encode()
        if begins is not None:
            assert self.idle
            assert begins == self.need_images[0]
            # A prompt is passed over only after four in a row.
            assert not refused or self.stages._prefills_in_a_row >= MOST_PREFILLS
            self.stages.encodes(begins)
            self.passed = 0
        # Where an image waits the lane is never idle, so it comes up after at most four prefills.
        assert not (self.need_images and self.idle)
        assert self.passed <= MOST_PREFILLS

    @precondition(lambda self: not self.idle)
    @rule()
    def job_ends_and_the_next_begins(self) -> None:
        if self.stages.encoding is not None:
            self.encode_ends(fails=False)
        else:
            self.prefill_ends("done")
        self.steps(decoding=True, lasted_s=0.1)

    @precondition(lambda self: self.stages.encoding is not None)
    @rule(fails=st.booleans())
    def encode_ends(self, fails: bool) -> None:
        name = self.stages.encoding
        self.stages.encoded()
        for call in [call for call in self.calls if call.name == name]:
            call.images = 0 if fails else call.images - 1
            if not call.images:
                self.stages.forget(call.name)

    @precondition(lambda self: self.stages.prefills.current is not None)
    @rule(outcome=st.sampled_from(["done", "failed"]))
    def prefill_ends(self, outcome: str) -> None:
        name = self.stages.prefills.current
        assert name is not None
        self.stages.prefills.ends(name, outcome)  # type: ignore[arg-type]
        self.calls = [call for call in self.calls if call.name != name]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.leaves(call)
        if call.name == self.stages.prefills.current:
            self.stages.prefills.ends(call.name, "cut")

    @rule()
    def all_clients_leave(self) -> None:
        for call in list(self.calls):
            self.leaves(call)
        if self.stages.prefills.current is not None:
            self.stages.prefills.ends(self.stages.prefills.current, "cut")
        # An image in the lane is encoded to its end.
        assert self.stages.pending == (self.stages.encoding is not None)
        self.stages.encoded()
        assert (self.stages.waiting, self.stages.pending, self.stages.current) == ((), 0, None)
        assert self.stages.next_encode() is None

    @invariant()
    def the_lane_has_one_job(self) -> None:
        stages = self.stages
        assert stages.encoding is None or stages.prefills.current is None
        assert list(stages.waiting) == self.need_images

    @invariant()
    def decodes_have_their_share(self) -> None:
        stages = self.stages
        encodes = {*self.need_images, stages.encoding} - {None}
        waits = stages.prefills.waiting
        assert waits <= len(self.calls)
        assert stages.pending == len(encodes) + waits + (stages.prefills.current is not None)
        sms = stages.decode_sms()
        if stages.current is None:
            assert sms is None
        else:
            share = SHARES[stages.current]
            assert sms == share.decode_sms(stages.pending)
            assert stages.pending >= 1
            if stages.pending == 1:
                assert sms == share.most_sms


TestScheduling = Scheduling.TestCase
