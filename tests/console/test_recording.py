"""The picture of `kvroute top`: what it holds, and that a hostile name stays text in it."""

from xml.etree import ElementTree

from tests.console.recording import ABOUT, BYTES_MAX, PICTURE, TITLE, picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_line_of_several_screens_is_there_once_and_keeps_its_colours() -> None:
    red = "\x1b[31mgpu-a\x1b[0m  <b>&"
    svg = picture([["head", red], ["head", "", red]], 20)
    assert texts(svg) == ["head", "gpu-a", "<b>&"]
    root = ElementTree.fromstring(svg)
    frames = [group for group in root.iter(f"{SVG}g") if group.get("class") == "f"]
    places = [[(use.get("href"), use.get("y")) for use in frame] for frame in frames]
    assert places == [[("#r0", "18"), ("#r1", "36")], [("#r0", "18"), ("#r1", "54")]]
    name, rest = list(root.iter(f"{SVG}text"))[1:]
    assert name.get("style") == "fill:#ff7b72"
    assert rest.get("style") is None
    assert (name.get("x"), rest.get("x")) == ("0", "56")


def test_each_screen_is_visible_in_its_part_of_the_round() -> None:
    svg = picture([["a"], ["b"], ["c"], ["d"]], 20)
    assert "animation:4s step-end infinite" in svg
    assert "k1{0%{visibility:hidden}25.000%{visibility:visible}50.000%{visibility:hidden}}" in svg
    assert "prefers-reduced-motion" in svg


def test_the_kept_picture_is_small_and_loads_nothing() -> None:
    svg = PICTURE.read_text(encoding="utf-8")
    assert len(svg.encode()) <= BYTES_MAX
    assert svg.count("http") == 1, "the name of SVG's namespace"
    root = ElementTree.fromstring(svg)
    assert [root.findtext(f"{SVG}{tag}") for tag in ("title", "desc")] == [TITLE, ABOUT]
    shown = texts(svg)
    assert "kvroute top" in shown[0]
    assert any("llama-05" in text for text in shown)
