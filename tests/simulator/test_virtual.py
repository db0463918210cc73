"""Loads that are played in virtual time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import EngineSettings, GatewaySettings, SimulatorSettings
from sidelight.simulator.virtual import EPOCH_NS, Played, SimulatedLoad, VirtualServer

SECOND = 10**9


def request(number: int, *, length: int = 100, max_tokens: int = 5) -> EngineRequest:
    ids = tuple(range(1000 * number, 1000 * number + length))
    return EngineRequest(request_id=f"cmpl-{number}", prompt_token_ids=ids, max_tokens=max_tokens)


def test_an_open_loop_sends_each_request_when_it_is_due_and_hears_of_it_later_by_the_network() -> None:
    """Submission is as planned, arrival half a round trip later, and each token another half after its step."""
    server = VirtualServer(SimulatorSettings(), network_s=0.01)
    played = server.play(
        SimulatedLoad(requests=map(request, range(3)), offsets_ns=[0, SECOND, 2 * SECOND], duration_s=2.5)
    )
    assert [each.submit_ns - EPOCH_NS for each in played.exchanges] == [0, SECOND, 2 * SECOND]
    for each in played.exchanges:
        assert each.record is not None
        assert each.record.arrival_ns == each.submit_ns + 5_000_000
        assert each.token_ns[0] == each.record.first_token_ns + 5_000_000
        assert each.token_ns[-1] == each.end_ns == each.record.finished_ns + 5_000_000
        assert len(each.token_ns) == 5
    assert played.end_ns == EPOCH_NS + 5 * SECOND // 2


def test_a_closed_loop_keeps_so_many_in_flight_and_sends_the_next_when_one_ends() -> None:
    """Behind the first wave, each submission is the end of an earlier request; none comes after the duration."""
    played = VirtualServer(SimulatorSettings()).play(
        SimulatedLoad(requests=map(request, range(999)), concurrency=4, duration_s=2)
    )
    ends = {each.end_ns for each in played.exchanges}
    assert [each.submit_ns for each in played.exchanges[:4]] == [EPOCH_NS] * 4
    assert {each.submit_ns for each in played.exchanges[4:]} < ends
    assert EPOCH_NS + SECOND < max(each.submit_ns for each in played.exchanges) < EPOCH_NS + 2 * SECOND
    for each in played.exchanges:
        assert sum(other.submit_ns <= each.submit_ns < other.end_ns for other in played.exchanges) <= 4


def test_pages_show_the_engine_at_their_moments_and_the_last_one_its_end() -> None:
    """Scrapes come at equal intervals; the first shows an idle engine, the last all that ended."""
    server = VirtualServer(SimulatorSettings(), network_s=0.002)
    played = server.play(SimulatedLoad(requests=map(request, range(20)), concurrency=20), scrape_s=0.1)
    at_ns = [page.request_ns + 1_000_000 for page in played.pages]
    assert at_ns == [EPOCH_NS + SECOND // 10 * number for number in range(len(at_ns))]
    assert b'vllm:e2e_request_latency_seconds_count{engine="0",model_name="sim-llama"} 0.0' in played.pages[0].body
    assert b'vllm:e2e_request_latency_seconds_count{engine="0",model_name="sim-llama"} 20.0' in played.pages[-1].body
    assert at_ns[-2] < max(each.end_ns for each in played.exchanges) <= at_ns[-1]


def test_the_same_settings_and_load_give_the_same_stamps_and_pages_to_the_byte() -> None:
    """Nothing depends on the process, on the clock or on the machine."""
    twice = [
        VirtualServer(SimulatorSettings()).play(
            SimulatedLoad(requests=map(request, range(30)), concurrency=8), scrape_s=0.2
        )
        for _ in range(2)
    ]
    first, second = ([(each.submit_ns, list(each.token_ns)) for each in played.exchanges] for played in twice)
    assert first == second
    assert [page.body for page in twice[0].pages] == [page.body for page in twice[1].pages]


def test_without_a_page_the_stamps_are_the_same() -> None:
    """Scraping is not part of what is measured."""
    shown, plain = (
        VirtualServer(SimulatorSettings(), shown=shown).play(
            SimulatedLoad(requests=map(request, range(30)), concurrency=8), scrape_s=0.05
        )
        for shown in (True, False)
    )
    assert [list(each.token_ns) for each in shown.exchanges] == [list(each.token_ns) for each in plain.exchanges]
    assert not plain.pages


def test_time_and_cache_go_on_from_load_to_load_until_the_cache_is_reset() -> None:
    """The second of two equal loads finds its prompts cached, the third after a reset does not."""
    server = VirtualServer(SimulatorSettings(engine_settings=EngineSettings(seed=3)))
    cached = []
    for reset in (False, False, True):
        if reset:
            assert server.engine.reset_prefix_cache()
        began_ns = server.now_ns
        played = server.play(SimulatedLoad(requests=map(request, range(3)), concurrency=1))
        assert played.start_ns == began_ns
        cached.append([each.record.cached_tokens for each in played.exchanges if each.record])
    assert cached == [[0, 0, 0], [96, 96, 96], [0, 0, 0]]


def through(gateway: GatewaySettings, *, concurrency: int = 1, count: int = 20, oom_at: int | None = None) -> Played:
    """Play requests of 100 and 5 tokens in a closed loop through a gateway."""
    settings = SimulatorSettings(gateway=gateway, engine_settings=EngineSettings(oom_at=oom_at))
    server = VirtualServer(settings, network_s=0.002)
    return server.play(SimulatedLoad(requests=map(request, range(count)), concurrency=concurrency))


def test_an_input_guardrail_takes_its_time_before_the_engine_sees_the_request() -> None:
    """30 ms and 50 us a token of 100 are between the client's submission and the engine's arrival, with the network."""
    played = through(GatewaySettings(input_s=0.03, input_token_s=50e-6))
    waits_ns = {each.record.arrival_ns - each.submit_ns for each in played.exchanges if each.record}
    assert waits_ns == {1_000_000 + 30_000_000 + 5_000_000}


def test_an_output_guardrail_lets_tokens_go_in_groups_when_it_has_looked_at_them() -> None:
    """Groups of three, the last of what is left; each 40 ms behind its last token and behind the group before."""
    plain = through(GatewaySettings(), count=1).exchanges[0].token_ns
    held = through(GatewaySettings(hold_tokens=3, hold_s=0.04), count=1).exchanges[0]
    first_ns = plain[2] + 40_000_000
    second_ns = max(first_ns, plain[4]) + 40_000_000
    assert list(held.token_ns) == [first_ns] * 3 + [second_ns] * 2
    assert held.end_ns == second_ns


def test_a_guardrail_refuses_a_share_of_the_prompts_and_the_same_ones_again() -> None:
    """With 0.3, some of 40 are answered with HTTP 400, at another load the same ones."""
    first, again = (through(GatewaySettings(refuse_ratio=0.3), concurrency=n, count=40) for n in (1, 8))
    refused = [{each.request.request_id for each in run.exchanges if each.status == 400} for run in (first, again)]
    assert refused[0] == refused[1]
    assert 5 <= len(refused[0]) <= 20
    assert {each.error for each in first.exchanges if each.record is None} == {
        "http_400: The prompt was refused by the content filter. Please modify your prompt and retry."
    }


def test_beyond_its_limit_a_gateway_turns_requests_away() -> None:
    """Six in flight where four may be: some get HTTP 503, never are more than four in the engine."""
    played = through(GatewaySettings(fail_above=4), concurrency=6)
    statuses = [each.status for each in played.exchanges]
    assert statuses[:6] == [200] * 4 + [503] * 2
    served = [each for each in played.exchanges if each.record]
    for each in served:
        assert sum(other.submit_ns <= each.submit_ns < other.end_ns for other in served) <= 4


def test_requests_of_an_engine_without_memory_fail_with_its_words() -> None:
    """All that were in a step of four sequences end so; a load of three never gets there."""
    failed = through(GatewaySettings(), concurrency=4, count=4, oom_at=4).exchanges
    assert {each.error for each in failed} == {"server: CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert {each.error for each in through(GatewaySettings(), concurrency=3, oom_at=4).exchanges} == {""}


@given(
    gateway=st.builds(
        GatewaySettings,
        input_s=st.sampled_from([0.0, 0.02]),
        hold_tokens=st.integers(0, 4),
        hold_s=st.sampled_from([0.0, 0.03]),
        refuse_ratio=st.sampled_from([0.0, 0.5]),
        fail_above=st.none() | st.integers(1, 4),
    ),
    oom_at=st.none() | st.integers(2, 4),
    closed=st.booleans(),
    network_s=st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_once_whatever_stands_before_the_engine(
    gateway: GatewaySettings, oom_at: int | None, closed: bool, network_s: float
) -> None:
    """It was served whole, refused, or lost with the engine's memory; then nothing is left, and time went on."""
    limits = EngineSettings(max_num_seqs=4, oom_at=oom_at)
    server = VirtualServer(SimulatorSettings(engine_settings=limits, gateway=gateway), network_s=network_s)
    offsets_ns = None if closed else [SECOND // 20 * number for number in range(15)]
    played = server.play(
        SimulatedLoad(requests=map(request, range(15)), offsets_ns=offsets_ns, concurrency=5, duration_s=10),
        scrape_s=0.5,
    )
    assert len(played.exchanges) == 15
    for each in played.exchanges:
        assert each.submit_ns < each.end_ns
        assert list(each.token_ns) == sorted(each.token_ns)
        assert each.status in ((200, 400, 503) if each.record is None else (200,))
        if each.record is not None and not each.error:
            assert len(each.token_ns) == 5
            assert each.token_ns[-1] == each.end_ns
    assert server.engine.pool.used == 0
    server.gateway.admit()
    scraped_ns = [page.response_ns for page in played.pages]
    assert scraped_ns == sorted(scraped_ns)
    assert server.now_ns >= played.end_ns
