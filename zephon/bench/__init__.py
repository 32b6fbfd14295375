"""The workloads of `zephon bench`, their bare limits and the peers beside them.

    cli/bench.py -> rounds.py -> one fresh process a measurement (child.py) -> a Sample
                                 bare.py     loops without any loader: the limit
                                 peers.py    torch's DataLoader with the same work
                                 pipelines.py, stream.py   Zephon
    report.py    samples of all rounds -> rows; table and JSON      plot.py   a picture of the rows

Every measurement is a process of its own, so none inherits the memory, threads or caches of the one before, and its
processes can be told apart in /proc. The systems take turns within a round, since machines drift; a share is a ratio
within one round.
"""
