"""The work of `envserver process`: runs rollouts of one or several environments in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..environment import Environment
from .curricula import Book, has_curriculum, stream_of
from .elsewhere import makers_of
from .group_run import Give, GroupRun, Part, Show, show_nothing
from .mix import Member
from .run_settings import ProcessSettings
from .stopping import Stop
from .tracking import tracking


def default_path(environment: Environment) -> Path:
    """Returns the file that `process` writes by default."""
    return Path("data") / f"{environment.name}.jsonl"


def process_run(
    members: Sequence[Member[ProcessSettings]],
    *,
    path_of: Callable[[Environment], Path | None] = default_path,
    give: Give | None = None,
    show: Show = show_nothing,
    stop: Stop | None = None,
) -> GroupRun:
    """Makes the run of `process`; the settings of the whole run are the first member's.

    Args:
        path_of: returns the file for an environment whose settings name none.
    """
    settings = members[0].spec.settings
    total = settings.total_groups
    return GroupRun(
        [_part(member, path_of, total) for member in members],
        settings,
        resume=settings.resume,
        overwrite=settings.overwrite,
        total_groups=total,
        expected=_expected(members, total),
        for_training=True,
        give=give,
        show=show,
        stop=stop,
        track=partial(
            tracking,
            settings.track,
            settings.tracking,
            settings,
            command="process",
            environments=[member.share.name for member in members],
        ),
        elsewhere=makers_of(settings, [member.share.weight for member in members]),
    )


def _part(
    member: Member[ProcessSettings],
    path_of: Callable[[Environment], Path | None],
    total: int | None,
) -> Part:
    environment, rules = member.environment, member.spec.settings.curriculum
    config = environment.config
    book = Book(environment, rules) if has_curriculum(rules) else None
    repeat = config.total_steps is not None or total is not None
    return Part(
        spec=member.spec,
        environment=environment,
        share=member.share,
        path=config.data_path_to_save_groups or path_of(environment),
        requests=stream_of(environment, None if book is None else book.curriculum, repeat=repeat),
        groups=config.total_steps,
        drop_zero_variance=bool(config.ensure_scores_are_not_same),
        observe=None if book is None else book.observe,
        learn=None if book is None else book.read,
    )


def _expected(members: Sequence[Member[ProcessSettings]], total: int | None) -> int | None:
    steps = [one.environment.config.total_steps for one in members]
    of_each = None if None in steps else sum(step or 0 for step in steps)
    return min((one for one in (total, of_each) if one is not None), default=None)
