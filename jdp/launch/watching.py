"""Watching: how does a launcher watch the processes that it has started?"""

import time
from collections.abc import Callable

from jdp.launch import endings, prometheus
from jdp.launch.endings import Exit
from jdp.launch.launcher_link import LauncherLink
from jdp.replicas import control_groups
from jdp.runtime import environment
from jdp.watch import job_watch, machine, status
from jdp.watch.job_watch import JobWatch, Outlets, WatchOptions
from jdp.watch.local_processes import LocalProcesses
from jdp.watch.record_file import RecordFiles
from jdp.watch.status import JobStatus


class Watch:
    """Watch of the processes of this host."""

    def __init__(
        self,
        options: WatchOptions,
        *,
        num_processes: int,
        show: Callable[[str], None],
        host: int = 0,
        link: LauncherLink | None = None,
        folder: str = "",
        timeline: str = "",
        port: int | None = None,
    ) -> None:
        """Makes nothing yet.

        Args:
          options: limits.
          num_processes: number of processes of the job, on all hosts.
          show: shows a line in the output and in the log of every process.
          host: index of this host.
          link: link to the launchers of other hosts, to which host 0 reports.
          folder: folder of the launcher, for the status of the job; "": none.
          timeline: folder for files with all entries of the records; "": none.
          port: port of loopback at which Prometheus finds the status; None: none.

        Raises:
          OSError: the folder for the records cannot be made, or the port is not free.
        """
        self._show, self._link = show, link
        self._num_processes = num_processes
        self._local = LocalProcesses(host, keeps_entries=bool(timeline))
        self._files = RecordFiles(timeline, host) if timeline else None
        self._folder = folder
        self._exporter = None if port is None else prometheus.Exporter(port)
        outlets = Outlets(
            show=show,
            publish=self._publish,
            tell=None if link is None else link.tell,
        )
        self._job = JobWatch(
            options, self._local, outlets, num_processes=num_processes, host=host
        )
        self._look_at_s = 0.0
        self._groups = tuple(
            str(folder)
            for folder in control_groups.find_folders(
                control_groups.read_own(), "memory"
            )
        )
        self._num_oom_kills = machine.count_oom_kills(self._groups)

    def environ(self, process_id: int) -> dict[str, str]:
        """Makes the memory of a process; returns what tells the process about it."""
        if self._num_processes == 1:
            return {}
        try:
            return {environment.RECORD: self._local.make_memory(process_id)}
        except OSError:  # There is no memory: the job runs without a watch.
            return {}

    def add(self, process_id: int, pid: int) -> None:
        """Begins to watch a process that was started."""
        self._local.add(process_id, pid)

    def note_end(self, process_id: int, returncode: int) -> None:
        """Notes that a process has ended."""
        end = endings.describe_exit(Exit(process_id, returncode))
        self._local.note_end(process_id, end.removeprefix(f"process {process_id} "))
        if returncode != -9:
            return
        count = machine.count_oom_kills(self._groups)
        if count > self._num_oom_kills:
            self._num_oom_kills = count
            self._show(
                f"process {process_id} was killed by SIGKILL when this host ran out of "
                "memory: the kernel has killed a process for it. Use smaller batches, "
                "fewer processes, or a host with more memory."
            )

    def look(self, *, keyboard: int | None = None) -> Exit | None:
        """Looks at all processes, at most once per period.

        Args:
          keyboard: the process that reads from the keyboard, if any.

        Returns:
          The end that a stall causes; None: the job goes on.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s or not self._local.processes:
            return None
        self._look_at_s = now_s + job_watch.PERIOD_S
        told = [] if self._link is None else self._link.take_told()
        end = self._job.look(told, keyboard=keyboard)
        self._write_files()
        if end is None:
            return None
        return Exit(end.process, job_watch.STALLED_CODE, note=end.note)

    def close(self) -> None:
        """Frees the memory."""
        if self._local.processes:
            self._local.look()
            self._write_files()
        if self._files is not None:
            self._files.close()
        if self._exporter is not None:
            self._exporter.close()
        self._local.close()

    def _write_files(self) -> None:
        if self._files is None:
            return
        try:
            entries = self._local.take_entries()
            self._files.write(entries, offset_ns=self._job.offset_ns)
        except OSError as error:
            self._files.close()
            self._files = None
            self._show(
                f"the records of the processes end here: {error.filename} cannot be "
                f"written ({error.strerror})."
            )

    def _publish(self, found: JobStatus) -> None:
        if self._folder:
            status.write(self._folder, found)
        if self._exporter is not None:
            self._exporter.found = found


class NoWatch:
    """Stands for a watch in jobs that have none."""

    def environ(self, process_id: int) -> dict[str, str]:
        """See `Watch`."""
        del process_id
        return {}

    def add(self, process_id: int, pid: int) -> None:
        """See `Watch`."""

    def note_end(self, process_id: int, returncode: int) -> None:
        """See `Watch`."""

    def look(self, *, keyboard: int | None = None) -> None:
        """See `Watch`."""

    def close(self) -> None:
        """See `Watch`."""
