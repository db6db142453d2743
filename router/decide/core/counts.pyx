# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Counts every pick in a PickTally (tally.py), in C, and the seconds of a decision's stages."""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from indexer.arrays cimport address_of

from router.decide.core.tally import BUCKETS_S, RATIO_DECISIONS, STAGES as STAGE_NAMES, TIERS
from router.fleet.answers import LENGTHS as LENGTH_BOUNDS

DEF STAGES = 4
"""Hash, match, cost, total."""
DEF BUCKETS = 11
DEF LENGTHS = 16
DEF FIELDS = 6
"""Of Overlap: raw, usable, and the tiers."""
DEF POOL_COUNTS = LENGTHS + FIELDS
"""Of PickTally.by_pool: picks by length, prompt tokens, and the tiers."""
assert len(BUCKETS_S) == BUCKETS and len(STAGE_NAMES) == STAGES and len(TIERS) == FIELDS - 2
assert len(LENGTH_BOUNDS) == LENGTHS
cdef size_t RATIO_DECISIONS_C = RATIO_DECISIONS
cdef dict _numbers = {name: number for number, name in enumerate(STAGE_NAMES)}


cdef class Counts:
    """Where a PickTally counts, and a clock for the stages of one decision at a time.

    A pick counts once in every stage, a decision that picks nobody in none."""

    def __init__(self, tally):
        self.tally = tally
        for i, stage in enumerate(tally.stages.values()):
            self._durations[i] = <int64_t *>address_of(stage.counts)
            self._totals_s[i] = <double *>address_of(stage.total_s)
        self._tokens = <int64_t *>address_of(tally.tokens)
        self._recent = <int64_t *>address_of(tally.recent)
        self._picks = <int64_t *>address_of(tally.picks)
        self._by_pool = <int64_t *>address_of(tally.by_pool)
        for i, bound in enumerate(BUCKETS_S):
            self._bounds_s[i] = bound
        for i, tokens in enumerate(LENGTH_BOUNDS):
            self._lengths[i] = tokens

    cpdef void begin(self):
        """A decision begins."""
        cdef int stage
        for stage in range(STAGES):
            self._spent_s[stage] = 0
        self._began_s = self._last_s = _clock_s()

    def __call__(self, str stage not None):
        """The end of a stage; one that comes twice, as where a last resort is looked at, takes the sum."""
        self.mark(_numbers[stage])

    @property
    def took_s(self):
        """Seconds by stage, of the decision at hand."""
        return {name: self._spent_s[number] for name, number in _numbers.items()}

    def picked(self, pick):
        """A pick was made: it counts, once in every stage."""
        cdef int32_t overlap[FIELDS]
        decision = pick.decision.computing
        overlaps = pick.overlap
        cdef int i
        for i in range(FIELDS):
            overlap[i] = overlaps[i]
        tally, source = self.tally, decision.pool.sources[decision.order[0]]
        self.overlap(
            decision.request.prompt.token_count, decision.ranking.best_overlap(), overlap, 1,
            tally.pool_row(source.heartbeat.model, source.heartbeat.role),
        )
        seconds = decision.ttft_s
        if seconds is not None:
            tally.predicted(seconds, decision.ranking.shortest_s)
        self.total()

    cdef void mark(self, int stage):
        cdef double now_s = _clock_s()
        self._spent_s[stage] += now_s - self._last_s
        self._last_s = now_s

    cpdef int total(self) except -1:
        """A worker was picked: all stages count, and the time since the decision began."""
        cdef int stage
        self._spent_s[STAGES - 1] = _clock_s() - self._began_s
        for stage in range(STAGES):
            self._add(stage, self._spent_s[stage])
        return 0

    cdef void overlap(self, uint64_t prompt_tokens, uint64_t reachable_tokens, const int32_t *overlaps, size_t rows, int64_t pool_row):
        """Counts what a pick takes from caches. overlaps: of the pick, by field of Overlap, at every `rows`th place.
        pool_row: in by_pool."""
        cdef size_t at = 2 * (<size_t>self._picks[0] % RATIO_DECISIONS_C), i
        cdef int64_t *of_pool = self._by_pool + POOL_COUNTS * pool_row
        cdef size_t length = 0
        while length < LENGTHS and self._lengths[length] < prompt_tokens:
            length += 1
        of_pool[length] += 1
        of_pool[LENGTHS + 1] += prompt_tokens
        self._tokens[0] += prompt_tokens
        self._tokens[1] += reachable_tokens
        for i in range(2, FIELDS):
            self._tokens[i] += overlaps[i * rows]
            of_pool[LENGTHS + i] += overlaps[i * rows]
        self._recent[at] = overlaps[rows]
        self._recent[at + 1] = prompt_tokens
        self._picks[0] += 1

    cdef void _add(self, int stage, double seconds):
        cdef int i = 0
        while i < BUCKETS and self._bounds_s[i] < seconds:
            i += 1
        self._durations[stage][i] += 1
        self._totals_s[stage][0] += seconds


cdef inline double _clock_s() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double>time.tv_sec + 1e-9 * <double>time.tv_nsec
