"""What all dashboards share: variables, how a panel looks, how it becomes JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
_HEIGHT = 8
_STAT_HEIGHT = 4
Unit = Literal[
    "suffix: frames/s",
    "suffix: episodes/s",
    "suffix: batches/s",
    "suffix: updates/s",
    "suffix: reconciles/s",
    "suffix: workers",
    "suffix: errors/s",
    "short",
    "s",
    "bytes",
    "Bps",
    "percentunit",
    "none",
    "reqps",
    "dateTimeFromNow",
    "dateTimeAsIso",
]
_JOB_PAGE = (
    "/d/cormorant-job?var-datasource=${datasource}&var-namespace=${__field.labels.namespace}"
    "&var-collectorjob=${__field.labels.collectorjob}&${__url_time_range}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel, before it has a place."""

    title: str
    description: str
    unit: Unit
    queries: Mapping[str, str]
    """Expressions by legend, which may hold `{{label}}`."""
    width: int = 8
    is_stat: bool = False
    shows_name: bool = False
    """Show the legend in place of the number (stat panels)."""
    is_stacked: bool = False
    most: float | None = None
    leads_to_job: bool = False
    """Each series is a job, and links to the dashboard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A row of panels under a heading."""

    title: str
    panels: tuple[Panel, ...]
    applies_to: str = ""
    """Jobs that it is about, where it is not about all: the row is closed, and its empty panels say so."""


def sheet(
    *, uid: str, title: str, description: str, variables: tuple[QueryVariable, ...], sections: tuple[Section, ...]
) -> Dashboard:
    """A dashboard of sections. Panels get numbers in the order in which they stand."""
    made = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["cormorant"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(DashboardLink("Cormorant").type(DashboardLinkType.DASHBOARDS).tags(["cormorant"]).keep_time(True))
        .with_variable(
            DatasourceVariable("datasource").label("Data source").type("prometheus").description("A Prometheus.")
        )
    )
    for variable in variables:
        made = made.with_variable(variable)
    number = 0
    for section in sections:
        number += 1
        row = Row(section.title).id(number).collapsed(bool(section.applies_to))
        if not section.applies_to:
            made = made.with_row(row)
        for panel in section.panels:
            number += 1
            built = _built(panel).id(number)
            if section.applies_to:
                row = row.with_panel(built.no_value(f"only for jobs with {section.applies_to}"))
            else:
                made = made.with_panel(built)
        if section.applies_to:
            made = made.with_row(row)
    return made


def choice(name: str, label: str, query: str, *, is_one: bool = False) -> QueryVariable:
    """A variable whose values are those of a label; all of them, unless one is to be chosen."""
    made = (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
    # ".*" finds what has no such label, too: a head that is scraped outside a cluster has no namespace.
    return made if is_one else made.include_all(True).multi(True).all_value(".*")


def text_of(dashboard: Dashboard) -> str:
    """The JSON that is committed and shipped."""
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build()) + "\n"


def _built(panel: Panel) -> timeseries.Panel | stat.Panel:
    made = (stat.Panel() if panel.is_stat else timeseries.Panel()).title(panel.title).description(panel.description)
    made = made.unit(panel.unit).datasource(SOURCE).span(panel.width)
    made = made.height(_STAT_HEIGHT if panel.is_stat else _HEIGHT)
    if panel.leads_to_job:
        made = made.data_links([DashboardLink("Open this job").url(_JOB_PAGE)])
    for letter, (legend, expr) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(letter)
        made = made.with_target(query.instant() if panel.is_stat else query.range())
    if isinstance(made, stat.Panel):
        text = BigValueTextMode.NAME if panel.shows_name else BigValueTextMode.AUTO
        return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).text_mode(text)
    made = made.min(0) if panel.most is not None else made
    if panel.most is not None:
        made = made.max(panel.most)
    if panel.is_stacked:
        made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    return made.legend(legend.show_legend(True)).tooltip(tooltip).line_width(1)
