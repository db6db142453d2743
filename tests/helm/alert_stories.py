"""What can go wrong with a fleet, as its metrics tell, and which alerts fire then and no others."""

from typing import NamedTuple

MINUTES = 45
"""Of each story; it is asked what fires at the end."""
NONE = f"0x{MINUTES}"
ABSENT = f"_x{MINUTES}"


def growing(by: int) -> str:
    """Values of a counter that grows each minute."""
    return f"0+{by}x{MINUTES}"


def lately(minutes: int, value: str, before: str = "0") -> str:
    """A value of the last minutes, and what it was before."""
    return f"{before}x{MINUTES - minutes} {value}x{minutes - 1}"


ONCE = lately(25, "5")
JUST_NOW = lately(4, "50")
NOW_AND_THEN = "0x14 1x14 2x15"
"""Every quarter of an hour."""


class Story(NamedTuple):
    """What differs from a healthy fleet, and what fires then."""

    told: str
    changes: dict[str, str]
    """Selector -> values, a minute each, as promtool reads them; the later one wins."""
    fires: set[str]


REFUSED = 'kvroute_requests_total{reason="NO_WORKER"}'
PICKED = 'kvroute_requests_total{outcome="picked"}'
PROMPTS = "kvroute_prompt_tokens_sum"
REACHABLE = "kvroute_overlap_reachable_tokens_total"
WAITS = "kvroute_queue_wait_seconds_bucket"
SOCKET = "kvroute_relay_socket_errors_total"
MADE = 'kvroute_prompts_total{source="local",kind="chat"}'
ESTIMATED = 'kvroute_prompts_total{source="estimate",kind="chat",reason="NO_TOKENIZER"}'
ANSWERED = 'kvroute_gateway_requests_total{outcome="finished"}'
STORIES = [
    Story("nothing is wrong", {}, set()),
    Story(
        "all routers wait for their index",
        {"kvroute_ready": NONE},
        {"KvrouteNoRouterReady", "KvrouteRoutersMissing"},
    ),
    Story(
        "nobody is scraped",
        {"kvroute_ready": ABSENT},
        {"KvrouteNoRouterReady", "KvrouteRoutersMissing"},
    ),
    Story("all routers start again", {"kvroute_ready": lately(2, "0", "1")}, set()),
    Story(
        "one router of three is gone",
        {'kvroute_ready{pod="router-1"}': lately(25, "_", "1")},
        {"KvrouteRoutersMissing"},
    ),
    Story(
        "one router of three has just been replaced",
        {'kvroute_ready{pod="router-1"}': lately(10, "0", "1")},
        set(),
    ),
    Story(
        "one router knows only workers that are down",
        {'kvroute_worker_up{pod="router-1"}': lately(5, "0", "1")},
        {"KvrouteNoWorkerUp"},
    ),
    Story(
        "one router has forgotten all workers",
        {'kvroute_worker_up{pod="router-1"}': lately(10, "_", "1")},
        {"KvrouteNoWorkerUp"},
    ),
    Story("all workers are away for a moment", {"kvroute_worker_up": lately(2, "0", "1")}, set()),
    Story("one worker of two is down", {'kvroute_worker_up{worker="w0"}': NONE}, set()),
    Story(
        "one request in eleven is refused",
        {PICKED: growing(100), REFUSED: growing(10)},
        {"KvrouteRequestsRefused"},
    ),
    Story("one in a hundred is refused", {PICKED: growing(99), REFUSED: growing(1)}, set()),
    Story(
        "half of a minute's requests were refused",
        {PICKED: growing(100), REFUSED: JUST_NOW},
        set(),
    ),
    Story(
        "requests wait 5 to 10 s at one router",
        {
            WAITS + '{pod="router-1"}': NONE,
            WAITS + '{pod="router-1",le=~"10.0|30.0|60.0|.Inf"}': growing(60),
        },
        {"KvrouteRequestsWaitLong"},
    ),
    Story(
        "requests wait half a second to one second",
        {WAITS: growing(60), WAITS + '{le=~"0.*"}': NONE},
        set(),
    ),
    Story(
        "requests have waited long for some minutes",
        {WAITS: NONE, WAITS + '{le=~"10.0|30.0|60.0|.Inf"}': JUST_NOW},
        set(),
    ),
    Story(
        "one router's queue is full",
        {'kvroute_queue_requests_total{fate="refused",pod="router-1"}': growing(5)},
        {"KvrouteQueueRefuses"},
    ),
    Story(
        "requests of low priority lose their places",
        {'kvroute_queue_requests_total{fate="displaced"}': growing(1)},
        {"KvrouteQueueRefuses"},
    ),
    Story(
        "a queue was full long ago, and requests wait",
        {
            'kvroute_queue_requests_total{fate="refused"}': ONCE,
            'kvroute_queue_requests_total{fate=~"arrived|dispatched|expired"}': growing(9),
        },
        set(),
    ),
    Story(
        "a fault of the router's own",
        {'kvroute_requests_total{reason="INTERNAL",pod="router-2"}': lately(10, "1")},
        {"KvrouteInternalErrors"},
    ),
    Story("one long ago", {'kvroute_requests_total{reason="INTERNAL"}': ONCE}, set()),
    Story(
        "one router's decisions take 50 to 100 ms",
        {
            'kvroute_decision_seconds_bucket{pod="router-1"}': NONE,
            'kvroute_decision_seconds_bucket{pod="router-1",le=~"0.1|.Inf"}': growing(60),
        },
        {"KvrouteDecisionsSlow"},
    ),
    Story(
        "decisions take long for some minutes",
        {
            "kvroute_decision_seconds_bucket": NONE,
            'kvroute_decision_seconds_bucket{le=~"0.1|.Inf"}': JUST_NOW,
        },
        set(),
    ),
    Story(
        "decisions take 1 to 2 ms",
        {
            "kvroute_decision_seconds_bucket": growing(60),
            'kvroute_decision_seconds_bucket{le=~"5e-05|0.0001|0.0002|0.0005|0.001"}': NONE,
        },
        set(),
    ),
    Story(
        "one pick in ten is never reported on",
        {
            PICKED: growing(100),
            'kvroute_requests_total{outcome="explained"}': growing(1000),
            'kvroute_reservations_ended_total{ending="expired"}': growing(10),
        },
        {"KvrouteReservationsExpire"},
    ),
    Story(
        "one in a hundred",
        {PICKED: growing(100), 'kvroute_reservations_ended_total{ending="expired"}': growing(1)},
        set(),
    ),
    Story(
        "a client crashed with all its requests",
        {
            PICKED: growing(100),
            'kvroute_reservations_ended_total{ending="expired"}': lately(10, "900"),
        },
        set(),
    ),
    Story(
        "half of what could be reused is computed",
        {
            PROMPTS: growing(1000),
            REACHABLE: growing(500),
            'kvroute_overlap_tokens_total{tier="device"}': growing(200),
            'kvroute_overlap_tokens_total{tier="predicted"}': growing(50),
        },
        {"KvrouteHitsMissed"},
    ),
    Story(
        "a little of it is",
        {
            PROMPTS: growing(1000),
            REACHABLE: growing(500),
            'kvroute_overlap_tokens_total{tier="device"}': growing(400),
        },
        set(),
    ),
    Story(
        "hardly anything could be reused, and nothing is",
        {PROMPTS: growing(1000), REACHABLE: growing(50)},
        set(),
    ),
    Story(
        "the holders were full for some minutes",
        {
            PROMPTS: growing(1000),
            REACHABLE: growing(500),
            'kvroute_overlap_tokens_total{tier="device"}': f"0+500x{MINUTES - 12} 16500x11",
        },
        set(),
    ),
    Story(
        "one router sends all to a worker where requests wait",
        {
            'kvroute_load_balance_score{pod="router-1"}': f"1.2x{MINUTES}",
            'kvroute_worker_requests{state="waiting",pod="router-1",worker="w0"}': f"6x{MINUTES}",
        },
        {"KvrouteLoadUneven"},
    ),
    Story(
        "one worker of many has the only requests",
        {"kvroute_load_balance_score": f"2.6x{MINUTES}"},
        set(),
    ),
    Story(
        "requests wait everywhere",
        {
            "kvroute_load_balance_score": f"0.2x{MINUTES}",
            'kvroute_worker_requests{state="waiting"}': f"6x{MINUTES}",
        },
        set(),
    ),
    Story(
        "one worker was crowded for some minutes",
        {
            "kvroute_load_balance_score": lately(10, "1.2"),
            'kvroute_worker_requests{state="waiting",worker="w0"}': lately(10, "6"),
        },
        set(),
    ),
    Story(
        "a relay has no NATS",
        {
            'kvroute_broker_connected{pod="engine-0"}': lately(30, "0", "1"),
            'kvroute_broker_errors_total{pod="engine-0",kind="not_connected"}': growing(60),
        },
        {"KvrouteNatsDisconnected"},
    ),
    Story("NATS goes for a moment", {"kvroute_broker_connected": lately(1, "0", "1")}, set()),
    Story(
        "a router reads too slowly",
        {'kvroute_broker_errors_total{kind="slow_consumer",pod="router-0"}': growing(1)},
        {"KvrouteNatsErrors"},
    ),
    Story(
        "NATS refuses a relay",
        {'kvroute_broker_errors_total{kind="error",pod="engine-0"}': growing(1)},
        {"KvrouteNatsErrors"},
    ),
    Story(
        "one router lost its connection",
        {
            'kvroute_stream_state{pod="router-0",state="live"}': lately(4, "0", "1"),
            'kvroute_stream_state{pod="router-0",state="suspect"}': lately(4, "1"),
        },
        {"KvrouteMostStreamsNotLive"},
    ),
    Story(
        "all relays start again",
        {
            'kvroute_stream_state{state="live"}': lately(2, "0", "1"),
            'kvroute_stream_state{state="recovering"}': lately(2, "1"),
        },
        set(),
    ),
    Story(
        "all relays fell silent",
        {
            'kvroute_stream_state{state="live"}': lately(4, "0", "1"),
            'kvroute_stream_state{state="silent"}': lately(4, "1"),
        },
        {"KvrouteMostStreamsNotLive"},
    ),
    Story(
        "of two workers the only one of its role has lost its stream",
        {
            'kvroute_stream_state{role="prefill",state="live"}': lately(4, "0", "1"),
            'kvroute_stream_state{role="prefill",state="suspect"}': lately(4, "1"),
        },
        set(),
    ),
    Story(
        "one stream goes from one trouble to another",
        {
            'kvroute_stream_state{pod="router-1",worker="w0",state="live"}': lately(20, "0", "1"),
            'kvroute_stream_state{pod="router-1",worker="w0",state="recovering"}': (
                f"0x{MINUTES - 20} 1x9 0x9"
            ),
            'kvroute_stream_state{pod="router-1",worker="w0",state="suspect"}': lately(10, "1"),
        },
        {"KvrouteStreamNotLive"},
    ),
    Story(
        "one stream recovers",
        {
            'kvroute_stream_state{worker="w0",state="live"}': lately(5, "0", "1"),
            'kvroute_stream_state{worker="w0",state="recovering"}': lately(5, "1"),
        },
        set(),
    ),
    Story(
        "a worker fails its requests for good",
        {'kvroute_worker_ejected{pod="router-1"}': lately(20, "1")},
        {"KvrouteWorkerEjected"},
    ),
    Story(
        "a worker is ejected for a moment",
        {"kvroute_worker_ejected": lately(2, "1")},
        set(),
    ),
    Story(
        "something is to be mended",
        {'kvroute_worker_warnings{code="relay",pod="router-2"}': lately(20, "1", "_")},
        {"KvrouteWorkerWarning"},
    ),
    Story(
        "something heals by itself",
        {'kvroute_worker_warnings{code="relay"}': lately(5, "1", "_")},
        set(),
    ),
    Story(
        "the index drifts",
        {'kvroute_stream_faults_total{fault="digest",pod="router-0"}': lately(25, "5")},
        {"KvrouteDigestsDiffer"},
    ),
    Story(
        "three replicas saw the index drift once",
        {'kvroute_stream_faults_total{fault="digest"}': lately(25, "2")},
        set(),
    ),
    Story(
        "messages get lost",
        {'kvroute_stream_faults_total{fault="gap",pod="router-0"}': growing(1)},
        {"KvrouteGaps"},
    ),
    Story(
        "much goes wrong for a moment",
        {
            'kvroute_stream_faults_total{fault="gap"}': JUST_NOW,
            'kvroute_recoveries_total{how="snapshot",result="failed"}': JUST_NOW,
            'kvroute_forgotten_total{what="index",reason="no_room"}': JUST_NOW,
            'kvroute_facts_dropped_total{reason="no_room_to_recover"}': JUST_NOW,
            'kvroute_broker_errors_total{kind="error"}': JUST_NOW,
            'kvroute_relay_engine_faults_total{fault="gap"}': JUST_NOW,
            f'{SOCKET}{{kind="unsent"}}': JUST_NOW,
        },
        set(),
    ),
    Story(
        "and now and then",
        {
            'kvroute_stream_faults_total{fault="gap"}': NOW_AND_THEN,
            'kvroute_recoveries_total{how="snapshot",result="failed"}': NOW_AND_THEN,
            'kvroute_forgotten_total{what="index",reason="no_room"}': NOW_AND_THEN,
            'kvroute_facts_dropped_total{reason="no_room_to_recover"}': NOW_AND_THEN,
            'kvroute_broker_errors_total{kind="error"}': NOW_AND_THEN,
            'kvroute_relay_engine_faults_total{fault="gap"}': NOW_AND_THEN,
            f'{SOCKET}{{kind=~"unsent|engine_silent"}}': NOW_AND_THEN,
        },
        set(),
    ),
    Story(
        "no snapshot can be had",
        {'kvroute_recoveries_total{how="snapshot",result="failed"}': growing(1)},
        {"KvrouteRecoveriesFail"},
    ),
    Story(
        "rings are too short, snapshots are not",
        {
            'kvroute_recoveries_total{how="ring",result="failed"}': growing(1),
            'kvroute_recoveries_total{how="snapshot",result="ok"}': growing(1),
        },
        set(),
    ),
    Story(
        "predictions keep failing",
        {'kvroute_stream_faults_total{fault="self_check",pod="router-0"}': growing(1)},
        {"KvrouteSelfCheckResyncs"},
    ),
    Story(
        "predictions failed here and there",
        {'kvroute_stream_faults_total{fault="self_check"}': lately(25, "3")},
        set(),
    ),
    Story(
        "the index is full",
        {'kvroute_forgotten_total{what="index",reason="no_room"}': growing(500)},
        {"KvrouteIndexFull"},
    ),
    Story(
        "workers come and go",
        {'kvroute_forgotten_total{what="index",reason=~"silent|removed"}': growing(500)},
        set(),
    ),
    Story(
        "an engine makes other tokens",
        {'kvroute_prompt_shapes{state="barred",pod="router-0"}': lately(15, "2")},
        {"KvrouteTokensDiffer"},
    ),
    Story(
        "an engine made other tokens until its canaries passed",
        {'kvroute_prompt_shapes{state="barred"}': "0x20 3x5 0x20"},
        set(),
    ),
    Story(
        "a third of the bodies have no tokens",
        {MADE: growing(1), ESTIMATED: growing(8)},
        {"KvroutePromptsEstimated"},
    ),
    Story(
        "some bodies have images",
        {MADE: growing(9), ESTIMATED: growing(1)},
        set(),
    ),
    Story(
        "a template hangs now and again",
        {'kvroute_failures_total{what="prompt_child",kind="time",pod="router-1"}': growing(1)},
        {"KvroutePromptChildrenKilled"},
    ),
    Story(
        "a child was lost",
        {'kvroute_failures_total{what="prompt_child",kind="exit"}': lately(10, "1")},
        set(),
    ),
    Story(
        "one answer in ten is cut",
        {ANSWERED: growing(9), 'kvroute_gateway_requests_total{outcome="cut"}': growing(1)},
        {"KvrouteGatewayFails"},
    ),
    Story(
        "clients leave, and send nonsense",
        {
            ANSWERED: growing(9),
            'kvroute_gateway_requests_total{outcome=~"cancelled|refused|worker_refused"}': growing(
                9
            ),
        },
        set(),
    ),
    Story(
        "a gateway is full",
        {'kvroute_refusals_total{program="gateway",reason="TOO_MANY_BYTES"}': growing(3)},
        {"KvrouteGatewayFull"},
    ),
    Story(
        "a gateway was full for a minute",
        {'kvroute_refusals_total{program="gateway"}': lately(25, "50")},
        set(),
    ),
    Story(
        "a gateway reaches no router",
        {'kvroute_gateway_client_total{name="fallback_picks"}': growing(50)},
        {"KvrouteGatewayWithoutRouter"},
    ),
    Story(
        "all tries fail",
        {
            'kvroute_gateway_client_total{name=~"attempts|retries"}': growing(50),
            'kvroute_gateway_client_total{name="retries_over_budget"}': growing(9),
        },
        {"KvrouteGatewayRetriesSpent"},
    ),
    Story(
        "routers were replaced, and workers are tried again",
        {
            'kvroute_gateway_client_total{name="fallback_picks"}': ONCE,
            'kvroute_gateway_client_total{name=~"attempts|retries"}': growing(50),
        },
        set(),
    ),
    Story(
        "someone speaks another language",
        {'kvroute_facts_dropped_total{reason="malformed"}': growing(1)},
        {"KvrouteFactsDropped"},
    ),
    Story(
        "facts are told twice",
        {'kvroute_facts_dropped_total{reason=~"duplicate|lower_epoch|tombstone"}': growing(1)},
        set(),
    ),
    Story(
        "a relay is too slow for its engine",
        {'kvroute_relay_engine_faults_total{fault="gap"}': growing(1)},
        {"KvrouteEngineGaps"},
    ),
    Story(
        "an engine hangs: each question takes all the time it has",
        {f'{SOCKET}{{kind="engine_silent"}}': growing(13)},
        {"KvrouteEngineSilent"},
    ),
    Story(
        "an engine misses a question a minute",
        {f'{SOCKET}{{kind="engine_silent"}}': growing(1)},
        set(),
    ),
    Story(
        "an engine loads its model",
        {f'{SOCKET}{{kind="engine_silent"}}': f"0x{MINUTES - 12} 120+120x11"},
        set(),
    ),
    Story(
        "a relay can't write its maps",
        {f'{SOCKET}{{kind="ledger_not_saved"}}': lately(10, "2")},
        {"KvrouteRelayLedgersLost"},
    ),
    Story("a volume was full once", {f'{SOCKET}{{kind="ledger_not_saved"}}': ONCE}, set()),
    Story(
        "a new relay found a map that it can't use",
        {f'{SOCKET}{{kind="ledger_unusable"}}': lately(10, "1", "_")},
        {"KvrouteRelayLedgersLost"},
    ),
    Story(
        "an old relay did, when it was new",
        {f'{SOCKET}{{kind="ledger_unusable"}}': lately(25, "1", "_")},
        set(),
    ),
    Story(
        "a relay can't send what it has",
        {f'{SOCKET}{{kind="unsent"}}': growing(60)},
        {"KvrouteRelayErrors"},
    ),
]
