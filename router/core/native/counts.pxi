"""Counts of the picks that the fast path makes, in a PickTally (tally.py)."""

cdef class _Counts:
    """Where a PickTally counts."""

    cdef object tally
    cdef int64_t *durations[STAGES]
    cdef double *totals_s[STAGES]
    cdef int64_t *tokens
    cdef int64_t *recent
    cdef int64_t *picks
    cdef int64_t *by_model
    cdef double bounds_s[BUCKETS]
    cdef double began_s
    cdef double ends_s[STAGES - 1]
    """Of the decision at hand."""

    def __init__(self, tally):
        self.tally = tally
        for i, stage in enumerate(tally.stages.values()):
            self.durations[i] = <int64_t *>address_of(stage.counts)
            self.totals_s[i] = <double *>address_of(stage.total_s)
        self.tokens = <int64_t *>address_of(tally.tokens)
        self.recent = <int64_t *>address_of(tally.recent)
        self.picks = <int64_t *>address_of(tally.picks)
        self.by_model = <int64_t *>address_of(tally.by_model)
        for i, bound in enumerate(BUCKETS_S):
            self.bounds_s[i] = bound

    cdef void begin(self):
        self.began_s = _clock_s()

    cdef void mark(self, int stage):
        """The end of a stage, which counts once a worker is picked: what is not picked here is
        measured where it is."""
        self.ends_s[stage] = _clock_s()

    cdef void picked(self, uint64_t prompt_tokens, uint64_t reachable_tokens, const int32_t *overlaps, size_t rows, int64_t model_row):
        """Overlaps: of the pick, at every `rows`th place. model_row: in by_model."""
        cdef size_t at = 2 * (<size_t>self.picks[0] % RATIO_DECISIONS_C), i
        cdef double last_s = self.began_s
        cdef int64_t *of_model = self.by_model + MODEL_COUNTS * model_row
        of_model[0] += 1
        of_model[1] += prompt_tokens
        of_model[2] += overlaps[rows]
        self.tokens[0] += prompt_tokens
        self.tokens[1] += reachable_tokens
        for i in range(2, FIELDS):
            self.tokens[i] += overlaps[i * rows]
        self.recent[at] = overlaps[rows]
        self.recent[at + 1] = prompt_tokens
        self.picks[0] += 1
        for i in range(STAGES - 1):
            self._add(i, self.ends_s[i] - last_s)
            last_s = self.ends_s[i]
        self._add(STAGES - 1, _clock_s() - self.began_s)

    cdef void _add(self, int stage, double seconds):
        cdef int i = 0
        while i < BUCKETS and self.bounds_s[i] < seconds:
            i += 1
        self.durations[stage][i] += 1
        self.totals_s[stage][0] += seconds


cdef inline double _clock_s() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double>time.tv_sec + 1e-9 * <double>time.tv_nsec
