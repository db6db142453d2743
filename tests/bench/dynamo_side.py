"""Dynamo's half of two benchmarks: runs in an environment with ai-dynamo-runtime and numpy alone.

    dynamo_side.py core                     bench_dynamo.py: name -> value, in its units
    dynamo_side.py memory WORKERS BLOCKS    bench_dynamo.py: bytes; nothing else was held before
    dynamo_side.py growth STAGE...          bench_growth.py: stages as JSON -> microseconds a match

Prints JSON. Inputs are the same as ours, by the same seeds, in the form that Dynamo takes: lists
of ints, and its events as JSON.
"""

import json
import os
import resource
import sys
import time
from statistics import median

import numpy as np
from dynamo.llm import RadixTree, compute_block_hash_for_seq


def microseconds(calls, repeats=5):  # type: ignore[no-untyped-def]
    """Median over repeats of the mean time of a call."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        found.append((time.perf_counter() - started) / len(calls) * 1e6)
    return median(found)


def stored(event_id, hashes, parent):  # type: ignore[no-untyped-def]
    blocks = [{"block_hash": h, "tokens_hash": h, "mm_extra_info": None} for h in hashes]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": event_id, "data": data, "dp_rank": 0}).encode()


def events(chain, size=16):  # type: ignore[no-untyped-def]
    """A chain as events of `size` blocks, each after the one before."""
    return [
        stored(i, chain[i : i + size], chain[i - 1] if i else None)
        for i in range(0, len(chain), size)
    ]


def chain(rng, length):  # type: ignore[no-untyped-def]
    return [int(h) for h in rng.integers(1, 1 << 62, length)]


def resident_bytes():  # type: ignore[no-untyped-def]
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def memory(workers, blocks):  # type: ignore[no-untyped-def]
    """Resident bytes for each (worker, block), in chains of 64 that all these workers hold."""
    rng = np.random.default_rng(3)
    messages = [events(chain(rng, 64)) for _ in range(blocks // 64)]
    tree = RadixTree()
    before = resident_bytes()
    for one in messages:
        for worker in range(workers):
            for message in one:
                tree.apply_event(worker, message)
    tree.find_matches([1], False)
    return (resident_bytes() - before) / (blocks * workers)


def core():  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 100_000, 8192).tolist() for _ in range(50)]
    results = {
        "hash_8192_b16": microseconds(
            [lambda p=p: compute_block_hash_for_seq(p, 16) for p in prompts]
        )
    }
    tree = RadixTree()
    chains = [chain(rng, 2048) for _ in range(50)]
    for one in chains:
        for worker in range(64):
            held = one[: 2048 * (worker + 1) // 64 // 16 * 16]
            for message in events(held):
                tree.apply_event(worker, message)
    for blocks in (512, 2048):
        results[f"match_{blocks}_w64"] = microseconds(
            [lambda c=c: tree.find_matches(c, False) for c in (one[:blocks] for one in chains)]
        )
    messages = [message for _ in range(400) for message in events(chain(rng, 512))]
    results["store_16"] = median(store_rate(messages) for _ in range(3))
    return results


def store_rate(messages):  # type: ignore[no-untyped-def]
    """Blocks a second, 16 in each message."""
    tree = RadixTree()
    started = time.perf_counter()
    for message in messages:
        tree.apply_event(0, message)
    tree.find_matches([1], False)  # waits for what is queued
    return len(messages) * 16 / (time.perf_counter() - started)


def growth(stage):  # type: ignore[no-untyped-def]
    """Microseconds a match: for each size of the tree, for each length of a prompt."""
    rng = np.random.default_rng(5)
    tree = RadixTree()
    chains = []
    found = []
    for count in stage["chains"]:
        for _ in range(count - len(chains)):
            one = chain(rng, stage["chain_blocks"])
            chains.append(one)
            messages = events(one, stage["stored"])
            for worker in range(stage["workers"]):
                held = len(messages) * (worker + 1) // stage["workers"]
                for message in messages[:held]:
                    tree.apply_event(worker, message)
        turns = np.random.default_rng(6).permutation(count)[: stage["prompts"]]
        found.append([of_prompts(tree, [chains[i][:n] for i in turns]) for n in stage["lengths"]])
    return found


def of_prompts(tree, prompts):  # type: ignore[no-untyped-def]
    """Median time of a match, rotating over prompts."""
    took = []
    for prompt in prompts * 3:
        started = time.perf_counter()
        tree.find_matches(prompt, False)
        took.append(time.perf_counter() - started)
    return median(took) * 1e6


def main():  # type: ignore[no-untyped-def]
    what, *about = sys.argv[1:]
    # On one core, as we have: each call goes through a thread of Dynamo's, and to wake one on a
    # core that sleeps takes longer than the call.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if what == "core":
        results = core()
    elif what == "memory":
        results = memory(*map(int, about))
    else:
        results = [growth(json.loads(one)) for one in about]
    json.dump(results, sys.stdout)


main()
