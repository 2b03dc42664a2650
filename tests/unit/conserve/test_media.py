"""Media in requests: their names, their places, and images that are none."""

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.media import (
    Lifted,
    Medium,
    Place,
    check_image,
    data_of,
    make_name,
    name_of,
    places,
    with_urls,
)
from conserve.recognition.normal import normalised
from tests.pictures import PNG, REFUSED, SERVED

LONG = base64.b64encode(bytes(range(256)) * 100).decode()
PIXELS = 16_000_000


# --- Long texts -----------------------------------------------------------------------------------

_texts = st.text(max_size=8) | st.sampled_from(
    [LONG, f"data:image/png;base64,{LONG}", f"see {LONG} or;base64,{LONG}", "data", ";base64,",
     "a\\b", 'a"b', "é"]
)  # fmt: skip
_bodies = st.recursive(
    _texts | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "url", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(body=st.dictionaries(st.sampled_from(["data", "messages"]), _bodies), spaced=st.booleans())
def test_what_is_lifted_comes_back_as_it_was(body: dict[str, Any], spaced: bool) -> None:
    raw = json.dumps(body, indent=1 if spaced else None).encode()
    lifted = Lifted(raw)
    assert lifted.put_back(lifted.raw) == raw
    # It stays JSON, and the same but for the marks.
    text = json.dumps(json.loads(lifted.raw))
    for mark, span in lifted.spans.items():
        assert text.count(mark) == 1
        text = text.replace(mark, span.decode())
    assert json.loads(text) == body


def test_some_can_be_put_back_for_good() -> None:
    raw = json.dumps([f"data:image/png;base64,{LONG}{n}aaa" for n in range(12)]).encode()
    lifted = Lifted(raw)
    lifted.drop([*lifted.spans][1:11:2])
    assert len(lifted.spans) == 7
    assert lifted.raw.count(LONG.encode()) == 5
    assert lifted.put_back(lifted.raw) == raw


def test_no_two_spans_have_one_mark() -> None:
    lifted = Lifted(json.dumps([f"data:image/png;base64,{LONG}{n}aaa" for n in range(3)]).encode())
    lifted.drop([next(iter(lifted.spans))])
    lifted.raw += lifted.add(b"fetched").encode()
    assert lifted.put_back(lifted.raw).endswith(f'{LONG}2aaa"]fetched'.encode())
    # Another text's are added to the same ones.
    lifted.raw += lifted.lift(json.dumps(f"data:image/png;base64,{LONG}3aaa").encode())
    assert len(lifted.spans) == 4
    assert lifted.size == len(lifted.put_back(lifted.raw))


@pytest.mark.parametrize(
    "text", [";base64,", '"data":"', ";base64," + "A" * 16_383, f";base64,{LONG}"]
)
def test_it_takes_time_in_proportion_to_the_body(text: str) -> None:
    """Megabytes of beginnings, which would take hours if each looked at all that follows."""
    raw = (text * (4_000_000 // len(text))).encode()
    lifted = Lifted(raw)
    assert lifted.put_back(lifted.raw) == raw


# --- Places ---------------------------------------------------------------------------------------


def _image_parts(url: str, **more: Any) -> dict[str, dict[str, Any]]:
    """A turn with an image in a message and one in a tool's result, by each API."""
    chat = {"type": "image_url", "image_url": {"url": url} | more}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"type": "input_image", "image_url": url} | more
    text = {"type": "text", "text": "what is it?"}
    return {
        CHAT: {
            "messages": [
                {"role": "user", "content": [text, chat]},
                {"role": "tool", "tool_call_id": "c", "content": [chat]},
            ]
        },
        MESSAGES: {
            "messages": [
                {"role": "user", "content": [text, block]},
                {"role": "user", "content": [{"type": "tool_result", "content": [block]}]},
            ]
        },
        RESPONSES: {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "?"}, item]},
                {"type": "function_call_output", "call_id": "c", "output": [item]},
            ]
        },
    }


WHERE = {
    CHAT: ["messages[0].content[1]", "messages[1].content[0]"],
    MESSAGES: ["messages[0].content[1]", "messages[1].content[0].content[0]"],
    RESPONSES: ["input[0].content[1]", "input[1].output[0]"],
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_each_part_is_found_by_its_path_and_gets_its_url(path: str) -> None:
    body = _image_parts("https://a.example/1.png")[path]
    found = places(body, path)
    assert [one.where for one in found] == WHERE[path]
    assert {(one.kind, one.url) for one in found} == {("image", "https://a.example/1.png")}
    own = with_urls(body, path, lambda place: f"data:{place.where}")
    assert [one.url for one in places(own, path)] == [f"data:{one}" for one in WHERE[path]]
    # The given body is as it was.
    assert body == _image_parts("https://a.example/1.png")[path]
    assert with_urls(body, path, lambda place: None) is body


def put_everywhere(seen: list[Place]) -> Callable[[Place], str]:
    def put(place: Place) -> str:
        seen.append(place)
        return "data:y"

    return put


def test_a_clients_names_do_not_go_on() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "cat"}
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}, "uuid": "cat"}
    alone = {"type": "image_url", "uuid": "dog"}
    body = {"messages": [{"role": "user", "content": [part, sound, alone, "x"]}]}
    seen: list[Place] = []
    own = with_urls(body, CHAT, put_everywhere(seen))
    assert [one.uuid for one in seen] == ["cat", "dog"]
    assert "uuid" not in json.dumps(own)
    assert own["messages"][0]["content"][2]["image_url"] == {"url": "data:y"}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": 5, "data": "AA"}}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": ["AA"]}}),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "a;conserve=f00"}}),
    ],
)
def test_no_part_gets_past_the_checks(path: str, part: Any) -> None:
    body = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(ApiError) as refused:
        places(body, path)
    assert (refused.value.status, refused.value.param) == (400, "messages[0].content[0]")


def test_each_member_that_could_be_read_is_a_place() -> None:
    part = {"type": "audio_url", "image_url": "data:x", "audio_url": {"url": "data:z"}}
    text = {"type": "text", "text": "hi", "image_url": None}
    body = {"messages": [{"role": "user", "content": [part, text]}]}
    assert [(one.kind, one.url) for one in places(body, CHAT)] == [
        ("image", "data:x"), ("audio", "data:z"),
    ]  # fmt: skip


def test_an_assistants_tool_results_stay_text_and_depth_has_an_end() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "data:x"}}
    result = {"type": "tool_result", "content": [image]}
    body: dict[str, Any] = {"messages": [{"role": "assistant", "content": [result, image]}]}
    assert [one.where for one in places(body, MESSAGES)] == ["messages[0].content[1]"]
    # By the role of the message, not of a block.
    own = {"type": "tool_result", "role": "assistant", "content": [image]}
    assert len(places({"messages": [{"role": "user", "content": [own]}]}, MESSAGES)) == 1
    deep: Any = {"image_url": "data:x"}
    for _ in range(900):
        deep = {"content": [deep]}
    assert places({"messages": [deep]}, CHAT) == []


# --- Names ----------------------------------------------------------------------------------------


def test_a_name_tells_tenants_bytes_and_what_is_made_of_them_apart() -> None:
    names = {
        make_name(salt, data, changes)
        for salt in (None, "a", "b")
        for data in (b"x", b"y")
        for changes in ("image", "video", "image low", "image {}")
    }
    assert len(names) == 3 * 2 * 4
    assert make_name("a", b"x", "image") == make_name("a", b"x", "image")
    assert make_name("a", b"mx", "i") != make_name("a", b"x", "im")


def test_detail_and_how_media_are_read_change_the_name_and_auto_does_not() -> None:
    def changes(**more: Any) -> Any:
        body = _image_parts("data:x", **more.pop("part", {}))[CHAT] | more
        return places(body, CHAT)[0].changes

    assert changes() == changes(part={"detail": "auto"})
    assert changes() != changes(part={"detail": "low"})
    assert changes() != changes(media_io_kwargs={"image": {}})


def test_a_url_carries_the_name_and_histories_are_known_by_it() -> None:
    url = Medium("f00", "image/png", "AAAA").url
    assert name_of(url) == "f00"
    assert name_of("data:image/png;base64,AAAA") is None
    assert name_of("https://a.example/;conserve=f00") is None

    def known(url: str) -> Any:
        return normalised(_image_parts(url)[CHAT]["messages"][0])

    assert known(url) == known(Medium("f00", "image/jpeg", "BBBB").url)
    assert known(url) != known(Medium("f01", "image/png", "AAAA").url)


@pytest.mark.parametrize(
    "url",
    ["data:image/png,plain", "data:image/png;base64,????", "data:;base64,AAA", "data:nothing",
     "data:image/png;base64," + LONG + "=AAA", "data:" + "x" * 100 + ";base64,AAAA"],
)  # fmt: skip
def test_what_is_no_base64_is_refused_by_its_part(url: str) -> None:
    with pytest.raises(ApiError) as refused:
        data_of(url, {}, "messages[3].content[1]")
    assert refused.value.status == 400
    assert refused.value.param == "messages[3].content[1]"


@given(data=st.binary(max_size=100), parameter=st.sampled_from(["", ";charset=x", ";conserve=f"]))
def test_data_is_read_whatever_its_parameters(data: bytes, parameter: str) -> None:
    text = base64.b64encode(data).decode()
    assert data_of(f"data:image/PNG{parameter};base64,{text}", {}, "x") == ("image/png", data, text)
    mark = {"m": base64.b64encode(data * 20_000)}
    assert data_of("data:image/png;base64,m", mark, "x") == ("image/png", data * 20_000, "m")


# --- Images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_images_of_many_kinds_are_taken(name: str) -> None:
    data, media_type = SERVED[name]
    assert check_image(data, PIXELS, "x")[0] == media_type


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_that_is_none_is_refused_and_shows_nothing_of_the_server(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(ApiError) as refused:
        check_image(data, PIXELS, "messages[3].content[1]")
    error = refused.value
    assert (error.status, error.param) == (400, "messages[3].content[1]")
    assert str(error).startswith("messages[3].content[1] ")
    assert said in str(error)
    assert not any(word in str(error) for word in ("BytesIO", "PIL", "/", "0x", "Error"))


@given(cut=st.integers(0, len(PNG)), at=st.integers(0, len(PNG) - 1), to=st.integers(0, 255))
def test_whatever_is_broken_is_read_or_refused(cut: int, at: int, to: int) -> None:
    broken = bytearray(PNG[:cut] if cut % 2 else PNG)
    if at < len(broken):
        broken[at] = to
    with contextlib.suppress(ApiError):
        assert check_image(bytes(broken), PIXELS, "x")[0] == "image/png"
