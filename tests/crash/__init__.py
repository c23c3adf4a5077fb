"""Instruments that crash, cut, kill and spoil a real bank, and count what of its promises is broken.

    python -m tests.crash --states 100000 --seed 1

``__main__`` is the one command, ``instruments`` lists them; each is a module that says what it proves and what it
cannot. ``states`` rebuilds what a power cut may leave of runs that were traced (``scenarios``, run by ``traced``, read
by ``trace`` and ``effects``, crashed by ``disk``, held against ``facts`` by ``check``). ``faults`` lets one system call
after another fail. ``power_cuts`` and ``block_replay`` cut the power of real file systems. ``training_kills`` kills
whole training runs. ``bit_rot`` and ``fuzz`` spoil files. Takeovers are in ``takeovers``, beside the other helpers.
"""
