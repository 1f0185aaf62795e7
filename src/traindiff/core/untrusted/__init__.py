"""Readers of files that a stranger may have written: sizes are limited and contents checked before they are used.

Every reader of recordings, and of other tools' files, reads through this package:

* `folder.Folder` opens only regular files inside one directory, and never waits for one;
* `demands.parse` bounds the size, the depth and the numbers of a JSON text before it parses it;
* `demands` say in one place which keys and types a parsed text must have.

The caller chooses the error for a refused file; the default is `CorruptRecordingError`.
"""
