"""Plans as text: one instruction per line, one section per rank; the whole text parses back to an equal plan.

    apportion.plan 3.0
    id 5f0c…                                    computed where it is left out
    header {"home_layout": "attention", …}      JSON, may span lines; what is left out follows from the rest
    request {"batch": …, "cluster": …, "model": …, "policy": …}
    report {…}                                  may be left out

    rank 0
    layout attention: row=0 token=0 length=8 sequence=0 position=0; row=8 …
    move attention -> linear: send 1 row=0 rows=4; receive 1 row=4 rows=4
    recurrent runs: row=0 rows=8 sequence=0 position=0 peer=0 past=-1 leads=1; row=8 …
    program default forward
      arenas KV 8x2, O 8x4                      may be left out: as large as what is used
      operands none, Q.home[0:8), …             only where the order is not that of first use
      launch 0 channel 1 all_to_all: send Q.home[0:8) to 1, receive KV.work[0:8) from 1
      wait 0
      attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) causal first, …
      finish O.home[0:8)

An operand is `tensor.space[row:end)`, then `.h2` for head set 2 and `.c4` for column 4 where these are not 0.
Bounds of a task are `causal`, `full` or `[dmin,dmax]`. `first` (`first_dq`, `first_dkv`) marks what is
overwritten. A column that an instruction has no place for appears as `b=operand` where it is not none; `~5` tells
operand 5 from an equal one before it. Comments run from `#` to the end of the line.
"""

from __future__ import annotations

from apportion.ir.text.listing import excerpt, format_instruction, format_plan, instruction_lines

__all__ = ["excerpt", "format_instruction", "format_plan", "instruction_lines"]
