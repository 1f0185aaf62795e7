"""Long recordings in blocks of steps: each block is read and merged by another process, and judged in its turn here."""
