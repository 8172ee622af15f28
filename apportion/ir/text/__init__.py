"""Plans as text: one instruction per line, one section per rank; the whole text parses back to an equal plan.

    apportion.plan 3.0
    id 5f0c…                                    computed if omitted
    header {"home_layout": "attention", …}      JSON, may span lines; omitted fields are derived
    request {"batch": …, "cluster": …, "model": …, "policy": …}
    report {…}                                  optional

    rank 0
    layout attention: row=0 token=0 length=8 sequence=0 position=0; row=8 …
    move attention -> linear: send 1 row=0 rows=4; receive 1 row=4 rows=4
    recurrent runs: row=0 rows=8 sequence=0 position=0 peer=0 past=-1 leads=1; row=8 …
    program default forward
      arenas KV 8x2, O 8x4                      optional: by default as large as used
      operands none, Q.home[0:8), …             only if not in order of first use
      launch 0 channel 1 all_to_all: send Q.home[0:8) to 1, receive KV.work[0:8) from 1
      wait 0
      attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) causal first, …
      finish O.home[0:8)

An operand is `tensor.space[row:end)`, then `.h2` for head set 2 and `.c4` for column 4 unless 0. Bounds of a task are
`causal`, `full` or `[dmin,dmax]`. `first` (`first_dq`, `first_dkv`) marks accumulators that are overwritten. A column
outside the instruction's form appears as `b=operand` unless it is none; `~5` distinguishes operand 5 from an earlier
equal one. Comments run from `#` to the end of the line.
"""

from __future__ import annotations

from apportion.ir.text.listing import excerpt, format_instruction, format_plan, instruction_lines

__all__ = ["excerpt", "format_instruction", "format_plan", "instruction_lines"]
