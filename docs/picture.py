"""Draw the README's picture: the terminal report of the demo's faulty run, as it is printed.

Run it after `traindiff demo`: python docs/picture.py traindiff-demo docs/first-divergence.svg
"""

import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from traindiff.analyse.compare import compare
from traindiff.present.text.results import print_report

if __name__ == "__main__":
    recordings, picture = Path(sys.argv[1]), Path(sys.argv[2])
    console = Console(record=True, width=124, file=StringIO(), force_terminal=True)
    result = compare(str(recordings / "baseline"), str(recordings / "faulty-lost-gradient"))
    print_report(console, result, top=10)
    console.save_svg(str(picture), title="traindiff compare baseline faulty-lost-gradient")
