"""Instruments that crash, cut, kill and spoil a real bank, and count what of its promises is broken.

    python -m tests.crash --states 100000 --seed 1

``__main__`` is the one command; each instrument is a module that says what it proves and what it cannot. ``states``
rebuilds what a power cut may leave of runs that were traced; ``faults`` lets one system call after another fail.
"""
