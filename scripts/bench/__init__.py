"""Benchmarks: each has a claim, peers that it is compared with, a limit, and checks its answers.

    python scripts/bench --list                        # all benchmarks and their claims
    python scripts/bench select --repeats 5            # one of them
    python scripts/bench step --ranks 4                # on ranks of this host, started for it
    python scripts/bench routes --nodes 4 --slots 2 --rate 200mbit    # on a virtual cluster
    python scripts/bench all --smoke                   # each at its smallest: answers, not times
    python scripts/bench NAME --help                   # its options
    python scripts/bench results                       # measures the documents' figures

`python -m bench` is the same where this folder's parent is on Python's path. Options and columns
are those of options.py, places those of ranks.py.

To add one: a file in benchmarks/ and a row in registry.py. The file has a docstring that begins
with the claim and names the peers, and

    parser()            `options.parser` with its own options added
    measure(chosen)     yields an `options.Table` for each setting, as soon as it is measured;
                        on ranks, every rank calls it, and rank 0's tables count
    draw(rows, path)    optional: the picture of --png, if it is not bars
    note(chosen)        optional: a record's note, for a benchmark that starts its own ranks

Contestants take turns, in another order each round (rounds.py). Results are verified (checks.py),
and a record describes the machine on which it was measured (records.py).
"""
