"""The admission queue: requests that wait for a worker with room, and their order. Pure.

The driver attempts and the queue ranks: `AdmissionQueue.candidates` says whose turn it is, the
driver makes one decision for each, and says `dispatched` or `passed`.

Laws:
- arrived = dispatched + waiting + refused + expired + cancelled + displaced + too long + unserved;
- requests with equal keys go in the order of their arrival;
- bounds in requests and bytes, of all and of a tenant, hold at every moment;
- nothing is kept of a tenant or a band that has no request waiting, but a share that it overdrew.
"""
