"""Control groups: which groups of Linux limit the cores and memory of this process?"""

import pathlib

ROOT = pathlib.Path("/sys/fs/cgroup")


def read_own() -> str:
    """Returns the groups of this process as /proc/self/cgroup has them, or ""."""
    try:
        return pathlib.Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def find_folders(
    groups: str, controller: str, root: pathlib.Path = ROOT
) -> list[pathlib.Path]:
    """Returns the folders of the groups whose limits hold, the innermost first.

    The groups above a group limit it, too. In a container, the listed path may be a
    path of the host, and `root` has the limit of the container.

    Args:
      groups: the content of /proc/self/cgroup; see cgroups(7).
      controller: "cpu" or "memory".
      root: the folder where control groups are mounted.
    """
    folders = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers
        group = base / path.lstrip("/")
        folders += [x for x in (group, *group.parents) if x.is_relative_to(base)]
    return folders
