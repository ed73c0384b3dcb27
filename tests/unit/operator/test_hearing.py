"""What an operator knows of heads first-hand: from when on, and how many are silent together."""

from datetime import timedelta

from cormorant_operator.job_state import Census, HeadAnswer, JobState
from cormorant_testing.operator_world import BEGIN

ANSWER = HeadAnswer(pod_uid="u1", phase="Running", frames=10)


def heard(state: JobState, answer: HeadAnswer, *, at_s: float) -> float:
    """The head answers. Returns from when on it was heard."""
    state.record_answer(answer, at=BEGIN + timedelta(seconds=at_s), max_gap_s=60)
    assert state.answering_since is not None
    return (state.answering_since - BEGIN).total_seconds()


def test_head_is_known_from_its_first_answer_on() -> None:
    state = JobState()
    assert state.answering_since is None
    assert [heard(state, ANSWER, at_s=at_s) for at_s in (5, 20, 80, 140)] == [5, 5, 5, 5]


def test_a_gap_or_another_head_begins_anew() -> None:
    state = JobState()
    heard(state, ANSWER, at_s=0)
    state.is_silent = state.is_token_refused = True
    assert heard(state, ANSWER, at_s=60.5) == 60.5
    assert (state.is_silent, state.is_token_refused) == (False, False)
    assert heard(state, HeadAnswer(pod_uid="u2", phase="Running", frames=0), at_s=70) == 70


def test_most_heads_silent_at_once_is_a_fault_of_the_operator() -> None:
    census = Census()
    for index in range(2):
        census.note(f"u{index}", "silent")
    assert not census.is_cut_off, "few heads prove nothing"
    for index in range(6):
        census.note(f"u{index}", "answering")
    census.note("u0", "silent")
    census.note("u1", "silent")
    assert not census.is_cut_off, "two may well have died"
    for index in range(3):
        census.note(f"u{index}", "silent")
    assert not census.is_cut_off, "half of them answer"
    census.note("u3", "silent")
    assert census.is_cut_off
    for index in range(4):
        census.note(f"u{index}", "refusing")
    assert not census.is_cut_off, "they answer: no"
    for index in range(6):
        census.forget(f"u{index}")
    assert census.counts.total() == 0
