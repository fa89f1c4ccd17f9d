"""Every command there is, one file each. Their modules import nothing heavy before they are called."""

import click

from dlprof.commands import check, compare, doctor, explain, export, report, rules, run, wrap

COMMANDS: tuple[click.Command, ...] = (
    check.check,
    compare.compare,
    doctor.doctor,
    explain.explain,
    export.export,
    report.report,
    rules.rules,
    run.run,
    wrap.wrap,
)
