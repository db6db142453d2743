"""What a simulated fleet is like, and what goes wrong in it: one struct, with units."""

import random
from dataclasses import dataclass

from events.relay.rank import CATCH_UP_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Shares are probabilities of one message or request; `_per_s` is how often in the fleet."""

    # --- the fleet ---
    workers: int = 2
    ranks: int = 1
    routers: int = 2
    active_s: float = 10.0
    """While requests and faults come."""
    quiet_s: float = 19.0
    """After that: nothing new goes wrong, and the last fault heals within its own time: a replay
    that is asked for three times, and what waited for it, among them."""
    forget_s: float = 30.0
    native_index: bool = False

    # --- engines ---
    block_count: int = 48
    """Of one rank."""
    block_tokens: int = 16
    canonical_tokens: int | None = None
    """Wanted of the relay; None: the engine's own, at least 16."""
    host_blocks: int = 0
    """Of one rank's second tier; 0: none."""
    offload_share: float = 0.5
    """Of new blocks, copied to the second tier."""
    requests_per_s: float = 5.0
    """Of one rank."""
    repeated_share: float = 0.5
    """Of prompts that were asked before, to their last token."""
    lora_share: float = 0.2
    salt_share: float = 0.2
    resets_per_s: float = 0.0
    """Of the prefix cache; an engine tells it with its next step."""
    engine_restarts_per_s: float = 0.0
    engine_down_s_max: float = 2.0
    start_told: bool = True
    """The engine exports when its process started."""

    # --- between engine and relay ---
    has_replay: bool = True
    replay_ring_batches: int = 10_000
    zmq_loss: float = 0.0
    zmq_delay_s_max: float = 0.01
    zmq_reconnect_s_max: float = 0.0
    """After a restart of the engine: what it says meanwhile is lost."""
    replay_unanswered: float = 0.0
    replay_cut_off: float = 0.0
    """The answer ends without its end marker."""
    replay_hole: float = 0.0
    """A batch is left out of the answer."""
    replay_delay_s_max: float = 0.05

    # --- the broker ---
    loss: float = 0.0
    duplication: float = 0.0
    delay_s_max: float = 0.02
    """Of each message; a stream keeps its order, two streams don't keep theirs."""
    late_share: float = 0.0
    late_s_max: float = 1.5
    requests_lost: float = 0.0
    """Snapshot requests or their answers."""
    requests_late: float = 0.0
    requests_late_s_max: float = 3.0
    blackouts_per_s: float = 0.0
    """One stream loses all its messages to one router for a while."""
    blackout_s_max: float = 4.0
    cuts_per_s: float = 0.0
    """One connection breaks: a router's or a relay's."""
    broker_restarts_per_s: float = 0.0
    cut_s_max: float = 3.0
    unnoticed_s_max: float = 1.5
    """From the break of a connection until its owner notices."""
    slow_consumers_per_s: float = 0.0

    # --- processes ---
    relay_restarts_per_s: float = 0.0
    relay_down_s_max: float = 3.0
    lingering_share: float = 0.0
    """Of relays that speak on for a while beside their successor."""
    linger_s_max: float = 4.0
    keep_s: float | None = None
    """From one time that a relay keeps its maps on disk to the next; None: it keeps none."""
    map_torn: float = 0.0
    """Maps that are torn when a relay starts again."""
    clock_back_s_max: float = 0.0
    """How far a restarted relay's clock may be behind that of its last life."""
    router_restarts_per_s: float = 0.0
    stalls_per_s: float = 0.0
    """Of a process: it does nothing, and what comes waits."""
    clock_stalls_per_s: float = 0.0
    """Of a process: it goes on, and its clock stands still."""
    stall_s_max: float = 4.0
    resyncs_per_s: float = 0.0

    # --- bounds, small enough to be met ---
    message_bytes: int = 64 * 1024
    relay_ring_bytes: int = 8 * 1024 * 1024
    snapshot_chunk_bytes: int = 512 * 1024
    stream_buffer_messages: int = 4096
    held_messages: int = 20_000
    replay_part_bytes: int = CATCH_UP_BYTES
    """Of a replay, applied in one go."""


def drawn(rng: random.Random) -> Options:
    """A fleet and its troubles. Each kind is on or off, so that a run has a character."""

    def at_times(most: float, share: float = 0.35) -> float:
        return rng.uniform(0.0, most) if rng.random() < share else 0.0

    clock_back_s_max = at_times(8.0, 0.05)
    block_tokens, canonical_tokens = rng.choice(
        [(16, None), (16, None), (16, None), (8, None), (4, 16), (32, 16), (16, 32), (12, None)]
    )
    # A recovery of many small chunks takes longer than the quiet, if each of them is slow.
    relay_ring_bytes, snapshot_chunk_bytes = rng.choice(
        [(8 * 1024 * 1024, 512 * 1024), (4096, 1024), (1024, 512), (4096, 512 * 1024)]
    )
    return Options(
        workers=rng.choice([1, 2, 2, 3]),
        ranks=rng.choice([1, 1, 2]),
        active_s=rng.uniform(3.0, 10.0),
        # One that speaks with a lower epoch is heard only when the higher one is forgotten.
        quiet_s=80.0 if clock_back_s_max else 19.0,
        forget_s=5.0 if clock_back_s_max else rng.choice([5.0, 30.0]),
        block_count=rng.choice([12, 24, 48, 96]),
        block_tokens=block_tokens,
        canonical_tokens=canonical_tokens,
        host_blocks=rng.choice([0, 0, 8, 40]),
        offload_share=rng.choice([0.3, 1.0]),
        requests_per_s=rng.uniform(1.0, 8.0),
        repeated_share=rng.choice([0.1, 0.5, 0.9]),
        resets_per_s=at_times(0.5),
        engine_restarts_per_s=at_times(0.4),
        start_told=rng.random() < 0.5,
        has_replay=rng.random() < 0.7,
        replay_ring_batches=rng.choice([10_000, 10_000, 40, 5, 1, 0]),
        zmq_loss=at_times(0.1),
        zmq_delay_s_max=rng.choice([0.002, 0.02, 0.2]),
        zmq_reconnect_s_max=at_times(2.0),
        replay_unanswered=at_times(0.5),
        replay_cut_off=at_times(0.5),
        replay_hole=at_times(0.3),
        replay_delay_s_max=rng.choice([0.01, 0.1, 1.5]),
        loss=at_times(rng.choice([0.02, 0.3])),
        duplication=at_times(0.3),
        delay_s_max=rng.choice([0.002, 0.05, 0.3]),
        late_share=at_times(0.05),
        requests_lost=at_times(0.5),
        requests_late=at_times(0.5),
        blackouts_per_s=at_times(0.4),
        cuts_per_s=at_times(0.4),
        broker_restarts_per_s=at_times(0.15),
        slow_consumers_per_s=at_times(0.4),
        relay_restarts_per_s=at_times(0.4),
        lingering_share=at_times(0.7),
        keep_s=rng.choice([None, 0.3, 1.0, 5.0]),
        map_torn=at_times(1.0, 0.5),
        clock_back_s_max=clock_back_s_max,
        router_restarts_per_s=at_times(0.3),
        stalls_per_s=at_times(0.4),
        clock_stalls_per_s=at_times(0.3),
        resyncs_per_s=at_times(0.3),
        message_bytes=rng.choice([64 * 1024, 256]),
        relay_ring_bytes=relay_ring_bytes,
        snapshot_chunk_bytes=snapshot_chunk_bytes,
        stream_buffer_messages=rng.choice([4096, 12]),
        held_messages=rng.choice([20_000, 6]),
        replay_part_bytes=rng.choice([CATCH_UP_BYTES, 4096, 1]),
    )
