-- One POST after the other, by turns from a file of JSON bodies, one a line.
-- wrk ... -s wrk.lua URL -- BODIES PATH; the last line that it prints is JSON.

local requests, turn = {}, 0

function init(args)
  local headers = { ["Content-Type"] = "application/json" }
  for body in io.lines(args[1]) do
    requests[#requests + 1] = wrk.format("POST", args[2], headers, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "us": %d, "errors": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
