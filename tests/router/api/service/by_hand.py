"""Costs of a receipt's rows, computed a second time from the policies' formulas."""

from math import nan

import pytest

from kvroute.v1 import router_pb2


def number(value: int, total: bool) -> float:
    """A total that a row carries only when it is known."""
    return float(value) if total else nan


def by_hand(policy: str, receipt: router_pb2.Receipt, row: router_pb2.CandidateRow) -> float:
    """A row's cost, from the numbers of its receipt and nothing else."""
    constants = receipt.parameters
    blocks = number(row.total_blocks, row.HasField("total_blocks"))
    slots = number(row.total_slots, row.HasField("total_slots"))
    load = row.active_blocks / blocks if blocks > 0 else 0.0
    queue = row.running + row.waiting + row.reserved
    match policy:
        case "dynamo-adaptive" | "dynamo-unguarded":
            mean, std = receipt.terms["load_mean"], receipt.terms["load_std"]
            uneven = mean > 0 and std > constants["balance_threshold"] * mean
            alpha = constants["alpha_balance"] if uneven else constants["alpha_cache"]
            slot_ratio = queue / slots if slots > 0 else 0.0
            ahead = constants["queue_weight"] * row.prefill_tokens_active
            again = 1 + constants["keep"] * row.terms["evicted_share"]
            work = (again * row.new_tokens + ahead) / receipt.prompt_tokens
            work -= row.terms["invested_share"]
            return alpha * (load - mean) + (1 - alpha) * work + constants["gamma"] * slot_ratio
        case "dynamo-logit":
            longest = receipt.terms["waiting_max"]
            waiting = max(0.0, row.waiting + row.reserved)
            overlap = receipt.prompt_tokens - row.new_tokens
            return -(
                constants["overlap_weight"] * overlap / receipt.prompt_tokens
                - load
                - (waiting / longest if longest > 0 else 0.0)
            )
        case "dynamo-blocks":
            size = row.terms["block_size"]
            raw = (row.prefill_tokens_active + receipt.prompt_tokens) / size
            overlap = row.overlap_tokens
            on_device = overlap.device + overlap.predicted
            credit = row.trust * (on_device + 0.75 * overlap.host + 0.25 * overlap.disk) / size
            blocks = row.active_blocks + row.terms["new_blocks"]
            return constants["prefill_load_scale"] * max(raw - credit, 0) + blocks
        case "ttft":
            terms = row.terms
            twice = constants["keep"] * terms["evicted_share"]
            seconds = terms["wait_s"] + terms["load_s"] + (1 + twice) * terms["prefill_s"]
            seconds += terms["room_s"]
            seconds += constants["crowding"] * terms["crowded_s"]
            unlearned_s = pytest.approx(0.04 * load)
            assert terms["tpot_s"] in (unlearned_s, pytest.approx(row.estimated_tpot_ms / 1000))
            seconds += constants["tokens"] * terms["tpot_s"]
            return seconds + constants["stall"] * queue * terms["prefill_s"]
        case "conductor":
            waiting = max(0.0, row.waiting + row.reserved)
            near = 0.7 * row.terms["distance"] + 0.3 * waiting
            stage = int(row.terms["stage"])
            return 1e6 * stage + (waiting, near, queue + load / (1 + load))[stage]
        case "cache-threshold":
            queue += load / (1 + load)
            by_cache = receipt.terms["best_share"] > constants["cache_threshold"]
            return row.new_tokens + queue / (1 + queue) if by_cache else queue
        case "prefill-queue":
            return row.prefill_tokens_active + row.new_tokens
        case "decode-room":
            terms = row.terms
            share = (row.active_blocks + terms["need_blocks"]) / blocks if blocks > 0 else 0.0
            batch = queue / (slots if slots > 0 else constants["slots_unknown"])
            way = (1 + terms["kv_distance"]) / 4 * row.new_tokens / receipt.prompt_tokens
            no_room = blocks > 0 and terms["need_blocks"] > blocks - row.active_blocks
            return share + batch + constants["way_weight"] * way + 1000 * no_room
        case "session-sticky":
            return row.terms["distance"] + (queue + 1 > receipt.terms["share"])
        case "power-of-two":
            return queue
        case "least-loaded":
            return queue + load / (1 + load)
        case "round-robin":
            return row.terms["last_picked"]
        case _:
            pytest.fail(f"{policy} has no formula here")
