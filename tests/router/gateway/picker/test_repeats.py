"""A request that a gateway asks for twice is reserved for once; a client's own headers do not."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.reservations.reservations import Ending
from router.gateway.picker.messages import ENDPOINT
from router.gateway.picker.repeats import REPEAT_S, Repeats
from tests.router.gateway.picker.test_server import CHAT, USAGE, asked, worker
from tests.stage.picker import Stage, a_picker, request_headers, response_body, response_headers

PICK = "10.0.0.1:8000"
IDS = st.sampled_from(["", "a", "b"])
ENDPOINTS = st.sampled_from(["", PICK, "10.0.0.2:8000"])
STREAMS = st.lists(
    st.tuples(IDS, ENDPOINTS, st.sampled_from([CHAT, "/v1/completions"]), st.floats(0, 1.5)),
    max_size=12,
)


@given(STREAMS, st.data())
def test_a_pick_is_given_again_once_to_a_stream_that_names_all_of_it(
    streams: list[tuple[str, str, str, float]], data: st.DataObject
) -> None:
    repeats, now_s = Repeats(), 0.0
    open_picks: dict[int, tuple[tuple[str, str, str], float]] = {}
    keys = {}
    for number, (request_id, endpoint, path, pause_s) in enumerate(streams):
        now_s += pause_s
        of_client = {ENDPOINT: endpoint} if endpoint else {}
        of_client |= {"x-request-id": request_id} if request_id else {}
        wanted = request_id, path, endpoint
        same = [n for n, (key, _) in open_picks.items() if key == wanted]
        known = repeats.take(path, of_client, now_s)
        is_fresh = bool(same) and now_s < open_picks[same[-1]][1] + REPEAT_S
        assert (known is not None) is is_fresh
        for each in same:
            del open_picks[each]
        if known is not None:
            assert (known.endpoints, known.headers) == (PICK, {"X-data-parallel-rank": "1"})
            continue
        headers = {"X-data-parallel-rank": "1"}
        keys[number] = repeats.answered(path, of_client, PICK, headers, now_s)
        assert (keys[number] is None) is (not request_id or bool(endpoint))
        if keys[number] is not None:
            for each in [n for n, (key, _) in open_picks.items() if key == keys[number]]:
                del open_picks[each]
            open_picks[number] = keys[number], now_s
        if open_picks and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(open_picks)))
            repeats.left(open_picks.pop(gone)[0])
        assert len(repeats) == len(open_picks)


async def ended(stage: Stage, *calls: object) -> None:
    """The answer passes through all streams of a request, and ends."""
    for call in calls:
        await call.write(response_headers())  # type: ignore[attr-defined]
        await call.read()  # type: ignore[attr-defined]
        await call.write(response_body(USAGE, last=True))  # type: ignore[attr-defined]
        await call.read()  # type: ignore[attr-defined]
        await call.done_writing()  # type: ignore[attr-defined]
    await stage.idle()


async def test_a_request_by_two_filters_of_one_gateway_is_reserved_for_once() -> None:
    async with a_picker(worker(), worker()) as stage:
        first, endpoint = await asked(stage, x_request_id="r")
        more = {"x_request_id": "r", "x_gateway_destination_endpoint": endpoint}
        second, again = await asked(stage, **more)
        assert (again, stage.open) == (endpoint, 1)
        third, _ = await asked(stage, **more)
        assert stage.open == 2, "once for each pick"
        await ended(stage, third, second, first)
        assert stage.endings == {Ending.FINISHED: 2}
        await stage.counted("kvroute_picker_requests_total", outcome="repeated")
        await stage.counted("kvroute_picker_requests_total", 2, outcome="finished")


async def test_a_client_that_names_id_and_endpoint_is_picked_for_as_any_other(stage: Stage) -> None:
    (endpoint,) = {each.address.removeprefix("http://") for each in stage.workers}
    own = {"x_request_id": "r", "x_gateway_destination_endpoint": endpoint}
    calls = [(await asked(stage, **own))[0] for _ in range(3)]
    assert stage.open == 3
    await ended(stage, *calls)
    assert stage.endings == {Ending.FINISHED: 3}
    assert stage.sample("kvroute_picker_requests_total", outcome="repeated") == 0


async def test_a_second_filter_is_counted_where_the_first_one_has_left(stage: Stage) -> None:
    first, endpoint = await asked(stage, x_request_id="r")
    more = {"x_request_id": "r", "x_gateway_destination_endpoint": endpoint}
    await ended(stage, first)
    second, _ = await asked(stage, **more)
    assert stage.open == 1
    await ended(stage, second)
    assert stage.endings == {Ending.FINISHED: 2}


async def test_headers_of_the_engines_plane_end_at_the_picker(stage: Stage) -> None:
    call = stage.call()
    own = {"x_data_parallel_rank": "3", "x_override_bootstrap_host": "10.0.0.9", "x_other": "1"}
    await call.write(request_headers(CHAT, last=True, **own))
    mutation = (await call.read()).request_headers.response.header_mutation
    assert sorted(mutation.remove_headers) == ["x-data-parallel-rank", "x-override-bootstrap-host"]
    call.cancel()
