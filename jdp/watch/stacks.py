"""Stacks: what did `faulthandler` write, and where is the main thread by it?"""

import os
import re
import site
import sysconfig

_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def find_frame(text: str) -> str:
    """Returns the innermost place in the user's code of the main thread; or "".

    Args:
      text: stacks of all threads as `faulthandler` writes them; the main thread, which
        began first, is the last.
    """
    starts = [match.end() for match in _THREAD.finditer(text)]
    if not starts:
        return ""
    frames = _FRAME.findall(text[starts[-1] :])
    if not frames:
        return ""
    packages = [*site.getsitepackages(), sysconfig.get_path("stdlib"), _OWN]
    own = [f for f in frames if not f[0].startswith((*packages, "<frozen "))]
    path, line, name = (own or frames)[0]
    return f"{path}:{line} in `{name}`"
