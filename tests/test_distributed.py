"""Work spread over ranks gives what one process gives; a rank that fails or dies ends the job with a message."""

import json
import signal
from pathlib import Path

import pytest
import rank_jobs
import torch
from ranks import results, start_ranks, start_scripts

from rco.distributed import Ranks, join, shared
from rco.store import CandidateStore, StoreError


@pytest.fixture(scope="module")
def alone():
    return rank_jobs.search()


@pytest.mark.parametrize("count", [2, 4])
def test_a_search_is_bit_identical_on_any_number_of_ranks(alone, count):
    first, *others = results(start_ranks(count, rank_jobs.search))
    assert first == alone
    assert others == [None] * (count - 1)


def test_a_rank_that_dies_ends_the_job_and_leaves_a_checkpoint(alone, tmp_path):
    state = tmp_path / "state.pt"
    found = start_ranks(3, rank_jobs.search, 10, state)
    assert 2 not in found
    for rank in (0, 1):
        kind, message, _ = found[rank][1]
        assert kind == "RankLostError"
        assert "rank has ended" in message
    resumed = start_ranks(2, rank_jobs.search, None, state, state)
    assert results(resumed)[0] == alone


def test_a_failure_is_told_to_all_with_its_rank():
    found = start_ranks(3, rank_jobs.fail, 1)
    assert found[1][1][:2] == ("ValueError", "no room on this device")
    for rank in (0, 2):
        assert found[rank][1][:2] == (
            "RankLostError",
            "Rank 1 of 3 failed: ValueError: no room on this device",
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_costs_no_block_that_any_had_written(tmp_path, rank):
    found = start_ranks(2, rank_jobs.fail_at_a_block, tmp_path / "store", rank, 2)
    assert found[rank][1][:2] == ("MemoryError", "no room for another block")
    assert found[1 - rank][1][:2] == (
        "RankLostError",
        f"Rank {rank} of 2 failed: MemoryError: no room for another block",
    )
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert {"0", "1", "2", "3"} <= manifest["blocks"].keys()  # two rounds of two were over


@pytest.mark.parametrize("items", [0, 2, 7])
def test_items_come_back_in_order_at_every_rank(items):
    found = results(start_ranks(3, rank_jobs.collect, items))
    for rank, (squares, told, done, refused) in enumerate(found):
        assert squares == [item**2 for item in range(items)]
        assert told == "from 0"
        assert done == ([] if rank == 0 else [0, 1, 2])
        assert "Rank 2 has another number than rank 0" in refused


def test_a_rank_that_does_not_answer_is_given_up():
    kind, message, _ = start_ranks(2, rank_jobs.hang)[0][1]
    assert kind == "RankLostError"
    assert "does not answer" in message


def test_a_request_to_terminate_is_an_error_that_can_be_told():
    before = signal.getsignal(signal.SIGTERM)
    found = start_ranks(2, rank_jobs.terminated)
    assert [found[rank][1][0] for rank in (0, 1)] == ["RankLostError"] * 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_no_thread_of_the_team_outlives_it():
    # One that did could need the interpreter while it ends: "terminate called without an active exception".
    found = start_scripts(2, Path(rank_jobs.__file__).with_name("leaving_rank.py"))
    for code, out, err in found:
        assert code == 0, err
        assert out.split()
        assert "gloo" not in out


def test_one_process_needs_no_others():
    with join() as ranks:
        assert ranks == Ranks()
        objective = rank_jobs.make_objective()
        with shared(objective, ranks) as same:
            assert same is objective
        assert ranks.map(lambda mine: [item + 1 for item in mine], 3) == [1, 2, 3]
        assert ranks.device("cuda") == "cuda"
    with pytest.raises(ValueError, match="positive"), join(timeout=0):
        pass


def test_a_shared_objective_offers_what_the_objective_does():
    """Otherwise several ranks would search without the curvature, or without a table."""

    class Offers:
        num_batches = 3
        tokens_per_batch = 7

        def __init__(self):
            self.curvature = torch.ones(2, 2, 2)

        def loss(self, gates, batch):
            return gates.sum()

        @property
        def option_errors(self):
            return torch.zeros(2, 2)

    class Several(Ranks):
        def broadcast(self, value):
            return value

        def map(self, function, items):
            return list(function(range(items)))

    objective = Offers()
    with shared(objective, Several(count=2)) as together:
        assert together.curvature is objective.curvature
        assert (together.tokens_per_batch, together.num_batches) == (7, 3)
        assert together.table("option_errors").shape == (2, 2)
        assert together.table("fisher_losses") is None
        assert not together.offers("noisy_loss")
        informed = together.with_tables(fisher_losses=torch.ones(2, 2))  # what a pipeline has measured itself
        assert informed.table("fisher_losses").sum() == 4
        assert informed.table("option_errors").shape == (2, 2)
        assert informed.curvature is objective.curvature
        assert together.selection.table("fisher_losses") is None
        assert informed.losses([(torch.ones(2, 2), 0)] * 2) == [4.0, 4.0]


def test_candidates_and_search_of_a_model_are_the_same_on_any_number_of_ranks(tmp_path):
    files, differences, result = rank_jobs.quantize_in_memory(tmp_path / "alone")
    for count in (2, 4):
        found = results(start_ranks(count, rank_jobs.quantize_in_memory, tmp_path / str(count)))
        assert [each[0] for each in found] == [files] * count
        assert [each[1] for each in found] == [differences] * count
        assert [each[2] for each in found] == [result] + [None] * (count - 1)
        CandidateStore.open(tmp_path / str(count)).verify()


def test_candidates_survive_the_death_of_rank_0(tmp_path):
    found = start_ranks(2, rank_jobs.quantize_in_memory, tmp_path, 1)
    assert 0 not in found
    assert found[1][1][0] == "RankLostError"
    with pytest.raises(StoreError, match="lacks 2 of 3 blocks"):
        CandidateStore.open(tmp_path)
    files, _, _ = results(start_ranks(2, rank_jobs.quantize_in_memory, tmp_path))[0]
    assert sorted(files) == ["0", "1", "2"]
    CandidateStore.open(tmp_path).verify()
