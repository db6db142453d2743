"""The admission queue: requests that wait for a worker with room, and their order. Pure.

The queue ranks requests and its driver decides them: `AdmissionQueue.candidates` yields requests in
the order of their turns; the driver makes one decision for each, and calls `dispatched` or
`passed`.

Laws:
- numbers of requests: arrived = dispatched + waiting + refused + expired + cancelled + displaced
  + too long + unserved;
- requests with equal keys go in the order of their arrival;
- bounds in requests and bytes, of all and of a tenant, hold at every moment;
- no line or count is kept for a tenant or a band without a waiting request, only the turns that it
  took beyond its share.
"""
