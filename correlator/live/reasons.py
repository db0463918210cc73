"""Why the TTFT of a request of production traffic is not broken down: as labels of metrics, and in words."""

NO_ENGINE = "no_engine_span"
NO_CLIENT = "no_client_span"
NO_FIRST = "no_first_token"
NO_TIMES = "no_engine_times"
CONTRADICTION = "contradiction"
FAILED = "failed"
EVICTED = "window_full"
NOT_ESTIMATED = "not_estimated"
DEFECT = "defect"
EXPLANATIONS = {
    NO_ENGINE: "no engine's span came for it, and there was no page to estimate from",
    NO_CLIENT: "no client's span came for it in time",
    NO_FIRST: "the client's span does not say when the first output arrived",
    NO_TIMES: "the engine's span states neither queue nor prefill time",
    CONTRADICTION: "the client waited less than the times that the engine states",
    FAILED: "the client's span ended in an error, and no engine's span came for it",
    EVICTED: "more spans arrived than are kept, and it was not waited for",
    NOT_ESTIMATED: "too few scrapes or requests in the minute around it to estimate from",
    DEFECT: "it was lost to a defect of Sidelight's",
}
REASONS = tuple(EXPLANATIONS)
NOT_COMPARED = "a watch compares no clocks"
