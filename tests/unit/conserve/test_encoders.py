"""Which encoder has an image, and which images nodes have."""

from conserve.encoders import PASSED_OVER_S, Encoder, Encoders

ONE, TWO, FAR = (
    Encoder("one", "http://10.0.0.1:1"),
    Encoder("two", "http://10.0.0.1:2"),
    Encoder("far", "http://10.0.0.2:1"),
)
NEAR, AWAY = "10.0.0.1", "10.0.0.2"


def of(*encoders: Encoder, most_known: int = 100) -> Encoders:
    made = Encoders(most_known)
    made.update(encoders)
    return made


def test_the_one_with_the_fewest_images_has_the_next() -> None:
    encoders = of(ONE, TWO)
    chosen = [encoders.begin(NEAR, name, 0.0) for name in "abc"]
    assert chosen == [ONE, TWO, ONE]
    encoders.end(ONE, "a")
    encoders.end(ONE, "c")
    assert encoders.begin(NEAR, "d", 0.0) == ONE


def test_an_image_that_is_being_encoded_has_no_second_encoder() -> None:
    encoders = of(ONE, TWO)
    assert [encoders.begin(NEAR, "a", 0.0) for _ in range(3)] == [ONE] * 3
    assert encoders.begin(NEAR, "b", 0.0) == TWO
    encoders.end(ONE, "a")
    # The node has it now, though others still wait for their answers.
    assert encoders.begin(NEAR, "a", 0.0) is None


def test_encoders_serve_their_own_node() -> None:
    encoders = of(ONE, FAR)
    assert encoders.begin("10.0.0.3", "a", 0.0) is None
    assert encoders.begin(AWAY, "a", 0.0) == FAR
    encoders.end(FAR, "a")
    assert encoders.lacks("a")
    assert encoders.begin(NEAR, "a", 0.0) == ONE
    encoders.end(ONE, "a")
    assert not encoders.lacks("a")


def test_without_encoders_nothing_is_lacking() -> None:
    encoders = of()
    assert not encoders.lacks("a")
    assert encoders.begin(NEAR, "a", 0.0) is None
    encoders.update([ONE])
    assert encoders.lacks("a")


def test_one_that_fails_is_passed_over_for_a_while() -> None:
    encoders = of(ONE, TWO)
    assert encoders.begin(NEAR, "a", 0.0) == ONE
    encoders.failed(ONE, 0.0)
    encoders.end(ONE, "a")
    assert [encoders.begin(NEAR, name, 1.0) for name in "bc"] == [TWO, TWO]
    # It is told of as long as the table has not noticed.
    encoders.update([ONE, TWO])
    assert encoders.begin(NEAR, "d", PASSED_OVER_S - 1) == TWO
    assert encoders.begin(NEAR, "e", PASSED_OVER_S) == ONE
    encoders.failed(TWO, PASSED_OVER_S)
    encoders.failed(ONE, PASSED_OVER_S)
    assert encoders.begin(NEAR, "f", PASSED_OVER_S) is None


def test_an_image_whose_turn_ended_is_still_lacking() -> None:
    encoders = of(ONE)
    assert encoders.begin(NEAR, "a", 0.0) == ONE
    encoders.give_up(ONE, "a")
    assert encoders.lacks("a")
    assert encoders.begin(NEAR, "a", 0.0) == ONE


def test_the_oldest_names_are_forgotten() -> None:
    encoders = of(ONE, most_known=2)
    for name in "abc":
        assert encoders.begin(NEAR, name, 0.0) == ONE
        encoders.end(ONE, name)
    assert [encoders.lacks(name) for name in "abc"] == [True, False, False]
