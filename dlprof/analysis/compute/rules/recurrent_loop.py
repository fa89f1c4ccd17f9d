"""A recurrent network is written out: each time step calls a dozen small operators, which the host launches one by one.

An LSTM over 96 time steps is some thousand kernels of 2 µs, forward and backward. Nothing of that is work for a GPU:
the step is as long as the host takes to launch it. cuDNN computes a time step in a few kernels, without the host.

Needs a trace of a GPU, and the number of parameters, which dlprof records: a deep network calls the same operators in a
row too, but with other weights each time. The rule looks for a body of operators (products, sigmoid, tanh, elementwise)
that is repeated 16 times or more, or for `nn.LSTMCell` and its kind called as often in a row.

Saving: the traced steps replayed with two short kernels for each time step instead, forward and backward, and without
the launches: the most that it can give.

What to change: `nn.LSTM`, `nn.GRU` or `nn.RNN` over the whole sequence. Where the cell has a formula of its own:
`torch.cuda.make_graphed_callables`, or `torch.compile`, which takes minutes for loops as long.
"""

from __future__ import annotations

from dlprof.analysis.chains.written_out import CELLS, GRU, LSTM, RNN, recurrent_loops
from dlprof.analysis.engine import JOB, Frame, Job, by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import SAVES_FROM
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import busiest
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration

_COLUMNS = {
    "form": "cell",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "kernels take_ns",
    "left_ns": "left at least_ns",
}
_LIBRARY = {
    LSTM: "`nn.LSTM(input_size, hidden_size, batch_first=…)` over the whole sequence",
    GRU: "`nn.GRU(input_size, hidden_size, batch_first=…)` over the whole sequence",
    RNN: "`nn.RNN(input_size, hidden_size, batch_first=…)` over the whole sequence",
    CELLS: "`nn.LSTM` (`nn.GRU`, `nn.RNN`) over the whole sequence instead of its cell in a loop",
}
_GATES = ("aten::tanh", "aten::sigmoid", "aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell")
_GRAPH = change(
    "for a cell of its own: `torch.cuda.make_graphed_callables`, which replays the launches, or `torch.compile`,"
    " which takes minutes for a loop as long"
)


def check(recurrent_loops: Frame = needs(recurrent_loops)) -> Estimate:
    if recurrent_loops.empty:
        return nothing("no recurrent network is written out")
    return Estimate(
        gone_ns=by_rank(recurrent_loops.drop_duplicates("rank"), "gain_ns"),
        noise_of=("host",),
        loses="is lost to a recurrent network that is written out, time step by time step",
    )


def explain(
    estimate: Estimate,
    recurrent_loops: Frame = needs(recurrent_loops),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Explanation:
    mine = estimate.rows(recurrent_loops)
    forms = mine.groupby("form", sort=False)["operators"].sum().sort_values(ascending=False).index.tolist()
    operators = float((mine["operators"] * mine["calls"]).sum())
    return Explanation(
        title="A recurrent network is written out, operator by operator",
        summary=f"Rank {estimate.worst} calls {operators:,.0f} small operators a step for it; their kernels take"
        f" {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step, launching them takes the rest.",
        changes=(*(change(_LIBRARY[form]) for form in forms), _GRAPH),
        evidence=table(f"Written-out recurrent networks, a step of rank {estimate.worst}", mine, _COLUMNS),
        at_most=True,
        where=busiest(job.facts[estimate.worst], "forward", "forward", _GATES),
        sure="Estimated by replaying the traced steps with two short kernels a time step instead: the most that it can"
        " give.",
    )


_SAVES_FROM = (*SAVES_FROM, "computation", "optimizer_host")
RULE = Rule("Written-out recurrent networks", check, explain, _SAVES_FROM, only_with="gpu", of_host=True)
