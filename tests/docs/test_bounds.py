"""Numbers that pages promise as bounds are those of the code."""

from pathlib import Path

import pytest

from events.engines import sockets, wire
from events.engines.pages import load, metrics_page, probe
from events.feed import feed, fence, fleet_view, intake, replicas, stream
from events.plane import facts
from events.relay import heartbeats, ledger_file, rank, warmer
from router.api.service.grpc_bounds import GRPC_BOUNDS
from router.cluster.replicas.replica_link import HEARD_PER_S
from router.config.settings.configurations import ServeConfig
from router.gateway import response_workers
from router.gateway.exchange import ESTIMATE_MAX
from router.gateway.server import pace, upstreams
from router.net.http2 import frames
from router.net.keys import followed, issuers
from router.net.listener import held
from router.net.listener.http_bounds import HEAD_TIMEOUT_S, IDLE_TIMEOUT_S
from tests.stage.pages import text_of

MIB = 1 << 20
SERVE = ServeConfig()
NATS, SECURITY, GATE = Path("docs/nats.md"), Path("docs/security.md"), Path("docs/gateway.md")
ENVOY = Path("docs/envoy.md")
BOUNDS: list[tuple[Path, str, bool]] = [
    (SECURITY, "One holds 128 MiB at most", held.HELD_MAX == 128 * MIB),
    (SECURITY, "and 2 KiB for each open call", held.STREAM_BYTES == 2048),
    (SECURITY, "10 KiB for a stream", held.HANDLER_BYTES + held.STREAM_BYTES == 10 << 10),
    (SECURITY, "256 MiB of messages that wait", held.PORT_HELD_MAX == 256 * MIB),
    (SECURITY, "over 1,000 frames a second that carry nothing", frames.CONTROL_MAX == 1000),
    (SECURITY, "four more for each frame of an answer", frames.CONTROL_PER_ANSWER == 4),
    (NATS, "256 KiB, hashes included", facts.FACTS_BYTES_MAX == 256 << 10),
    (
        NATS,
        "128 KiB; 1 MiB",
        (facts.HEARTBEAT_BYTES_MAX, facts.MESSAGE_BYTES_MAX) == (MIB // 8, MIB),
    ),
    (NATS, "1,536, 4,096; 16,384", facts.FACTS_IN_MESSAGE_MAX == 1536),
    (NATS, "1,536, 4,096; 16,384", (facts.FACTS_MAX, facts.RING_MESSAGES_MAX) == (4096, 16_384)),
    (NATS, "16 MiB (30,000 small messages", intake.BUDGET_COST == 16 * MIB),
    (NATS, "bytes plus 512", intake.MESSAGE_COST == 512),
    (NATS, "in slices of 64 KiB", intake.SLICE_COST == 64 << 10),
    (NATS, "16 MiB; 128 MiB, over which the longest queue goes", intake.QUEUE_COST_MAX == 16 * MIB),
    (NATS, "16 MiB; 128 MiB, over which", intake.QUEUES_COST_MAX == 128 * MIB),
    (NATS, "for 1 s, doubled each time up to 64 s", (fence.PAUSE_S, fence.PAUSE_MAX_S) == (1, 64)),
    (NATS, "after 120 s within its budget", fence.CALM_S == 120),
    (
        NATS,
        "a quarter of its budget, from 2 s on a sixteenth",
        fence.BEHIND_S == ((2, 16), (0.5, 4)),
    ),
    (NATS, "A router that is 2 s behind", stream.LATE_S == 2),
    (NATS, "others of the last 4 to 8 s", fleet_view.DELAY_WINDOW_S == 4),
    (NATS, "ranks of one worker id | 1,024", fleet_view.RANKS_MAX == 1024),
    (NATS, "4,096 and 32 MiB; 256 MiB over all", stream.BUFFER_MESSAGES_MAX == 4096),
    (NATS, "4,096 and 32 MiB; 256 MiB over all", stream.BUFFER_BYTES_MAX == 32 * MIB),
    (NATS, "32 MiB; 256 MiB over all streams", fleet_view.WAITING_BYTES_MAX == 256 * MIB),
    (NATS, "64 MiB (8 million blocks), 1,024, 30 s", feed.RECOVERY_BYTES_MAX == 64 * MIB),
    (NATS, "(8 million blocks), 1,024, 30 s", (feed.CHUNKS_MAX, feed.RECOVERY_S) == (1024, 30)),
    (NATS, "the first 3 at once, then pauses of 0.5 s", stream.RECOVERIES_FREE == 3),
    (NATS, "pauses of 0.5 s doubling to 8 s", (stream.PAUSE_S, stream.PAUSE_MAX_S) == (0.5, 8)),
    (NATS, "(none for 30 s ends the row)", stream.STEADY_S == 30),
    (NATS, "number at once | 256 MiB, 16", feed.RECOVERIES_BYTES_MAX == 256 * MIB),
    (NATS, "number at once | 256 MiB, 16", feed.RECOVERIES_AT_ONCE == 16),
    (NATS, "250,000; 1, 4, 64", facts.WARM_TOKENS_MAX == 250_000),
    (NATS, "250,000; 1, 4, 64", (warmer.JOBS_MAX, warmer.REPLIES_MAX) == (4, 64)),
    (NATS, "64; 8,192 |", (replicas.REPLICAS_MAX, replicas.WORKERS_MAX) == (64, 8192)),
    (NATS, "A message counts for 3 s", replicas.TTL_S == 3),
    (NATS, "no replica receives more than 500 messages a second", HEARD_PER_S == 500),
    (NATS, "8 MiB, not compressed; 2 s", probe.DOCUMENT_BYTES_MAX == 8 * MIB),
    (NATS, "16,384; read in linear time", metrics_page.LINES_MAX == 16_384),
    (NATS, "2^31 - 1; 100", (load.COUNT_MAX, load.SHARE_MAX) == (2**31 - 1, 100)),
    (NATS, "10^9; more counts as unknown", heartbeats.BLOCKS_MAX == 10**9),
    (NATS, "16 MiB and 1 KiB; libzmq", sockets.FRAME_BYTES_MAX == 16 * MIB + 1024),
    (NATS, "16 MiB, 131,072; 1,048,576", wire.PAYLOAD_BYTES_MAX == 16 * MIB),
    (NATS, "131,072; 1,048,576", (wire.EVENTS_MAX, wire.TOKENS_MAX) == (1 << 17, 1 << 20)),
    (NATS, "64 KiB of a replay, or one batch", rank.CATCH_UP_BYTES == 64 << 10),
    (NATS, "20,000 and 128 MiB", rank.HELD_MESSAGES_MAX == 20_000),
    (NATS, "20,000 and 128 MiB", rank.HELD_BYTES_MAX == 128 * MIB),
    (NATS, "1,000 (ZMQ counts messages", sockets.RECEIVE_QUEUE_MESSAGES == 1000),
    (NATS, "3, 2 s, 20 s, 100,000, 512 MiB", sockets.REPLAY_QUESTIONS == 3),
    (NATS, "3, 2 s, 20 s, 100,000", (sockets.REPLAY_QUIET_S, sockets.REPLAY_S) == (2, 20)),
    (NATS, "100,000, 512 MiB", sockets.REPLAY_MESSAGES_MAX == 100_000),
    (NATS, "100,000, 512 MiB", sockets.REPLAY_BYTES_MAX == 512 * MIB),
    (NATS, "written every 30 s if something changed", ledger_file.KEEP_S == 30),
    (SECURITY, "the file is looked at every 5 s", followed.FOLLOW_S == 5),
    (SECURITY, "fetched every 5 minutes", issuers.REFRESH_S == 300),
    (SECURITY, "(0600)", SERVE.grpc.unix_socket_mode == "0600"),
    (SECURITY, "48 s at most", GRPC_BOUNDS.stream_age_s == 48),
    (SECURITY, "60 s after the connection's 300 s", GRPC_BOUNDS.age_s == 300),
    (SECURITY, "`connections_max` (10,000)", SERVE.http.connections_max == 10_000),
    (SECURITY, "20 s from acceptance", HEAD_TIMEOUT_S == 20),
    (GATE, "line and headers of at most 16 KiB", upstreams.HEADER_KIB_MAX == 16),
    (GATE, "connection to a worker may take 5 s", upstreams.CONNECT_TIMEOUT_S == 5),
    (SECURITY, "300 s without a request", IDLE_TIMEOUT_S == 300),
    (ENVOY, "after 20 s (", HEAD_TIMEOUT_S == 20),
    (ENVOY, "10 s and 1 s more for each 1,024 bytes", pace.GRACE_S == 10),
    (ENVOY, "for each 1,024 bytes, at most 120 s", pace.PACE_BYTES_PER_S == 1024),
    (ENVOY, "sends it whole, 120 s", pace.BODY_S == 120),
    (GATE, "8,192 tokens at most", ESTIMATE_MAX == 8192),
    (GATE, "waited for over 10 s must have brought 1,024", pace.GRACE_S == 10),
    (GATE, "must have brought 1,024 for each", pace.PACE_BYTES_PER_S == 1024),
    (GATE, "all within 120 s of waiting", pace.BODY_S == 120),
    (GATE, "the last 65,536 responses", response_workers.RESPONSES_MAX == 65_536),
    (GATE, "each for 24 hours", response_workers.RESPONSE_TTL_S == 24 * 3600),
]


@pytest.mark.parametrize(
    ("page", "text", "holds"), BOUNDS, ids=[f"{page.stem}: {text}" for page, text, _ in BOUNDS]
)
def test_a_number_of_a_page_is_that_of_the_code(page: Path, text: str, holds: bool) -> None:
    assert text in " ".join(text_of(page).split())
    assert holds
