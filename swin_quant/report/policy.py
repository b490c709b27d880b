"""A policy as a table of its rules, as a notebook shows it."""

from swin_quant.quant.policy import Policy, Rule
from swin_quant.report.table import Column, ReportTable, field, html_table

_COLUMNS: tuple[Column[Rule], ...] = (
    Column("enable", "enable", lambda rule: ", ".join(rule.enable) or None, may_lack=True),
    Column("disable", "disable", lambda rule: ", ".join(rule.disable) or None, may_lack=True),
    Column("nodes", "nodes", lambda rule: ", ".join(rule.nodes) or None, may_lack=True),
    Column("format", "format", field("format"), may_lack=True),
    Column("bits", "bits", field("bits"), right=True, may_lack=True),
    Column("granularity", "granularity", field("granularity"), may_lack=True),
    Column("block", "block", field("block"), right=True, may_lack=True),
    Column("narrow_range", "narrow range", field("narrow_range"), may_lack=True),
    Column("symmetric", "symmetric", field("symmetric"), may_lack=True),
    Column("amax", "amax", field("amax"), right=True, may_lack=True),
)


def policy_html(policy: Policy) -> str:
    """The rules of a policy, a row each."""
    remarks = [policy.description] if policy.description else []
    table = ReportTable(_COLUMNS, policy.rules, [*remarks, "Later rules override earlier ones."])
    return html_table(table, policy.name)
