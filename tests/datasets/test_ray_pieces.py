from layertap.datasets.conversations import TextPrompt
from layertap.datasets.inputs import InputRecord
from layertap.datasets.ray_pieces import MOST_DEATHS, Holding, Pieces


def records(*indices):
    return [
        InputRecord(index=index, where=f"line {index}", prompt=TextPrompt(f"{index}"), source_hash=f"{index:032x}")
        for index in indices
    ]


def indices(piece):
    return [record.index for record in piece.records]


def drain(pieces):
    found = []
    while (piece := pieces.next()) is not None:
        found.append(indices(piece))
    return found


def test_pieces_are_cut_by_the_place_in_the_input_whatever_is_done_already():
    assert drain(Pieces(records(*range(10)), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert drain(Pieces(records(2, 3, 5, 9), 4)) == [[2, 3], [5], [9]]
    assert drain(Pieces([], 4)) == []


def test_what_a_dead_actor_had_not_published_is_handed_out_again_and_nothing_else():
    pieces, holding = Pieces(records(*range(12)), 4), Holding()
    for _ in range(2):
        pieces.give(pieces.next(), holding)
    del holding.open[1]  # published
    assert pieces.take_back(holding) == []
    assert not holding.open
    assert drain(pieces) == [[0, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not pieces.pending


def test_records_of_pieces_that_ended_but_were_not_published_come_again_without_blame():
    pieces, holding = Pieces(records(*range(8)), 4), Holding()
    pieces.give(pieces.next(), holding)
    holding.queued.popleft()  # it ended; its shard is still open
    pieces.give(pieces.next(), holding)
    pieces.take_back(holding)
    assert sorted(index for piece in drain(pieces) for index in piece) == list(range(8))


def test_a_record_that_kills_its_actors_is_found_and_given_up_and_its_neighbours_are_not():
    pieces, done, given_up = Pieces(records(*range(8)), 4), [], []
    deaths = 0
    while (piece := pieces.next()) is not None:
        holding = Holding()
        pieces.give(piece, holding)
        if 2 in indices(piece):
            deaths += 1
            given_up += pieces.take_back(holding)
        else:
            done += indices(piece)
    assert [record.index for record in given_up] == [2]
    assert sorted(done) == [0, 1, 3, 4, 5, 6, 7]
    assert deaths == MOST_DEATHS + 1
