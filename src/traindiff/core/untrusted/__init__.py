"""Files that a stranger may have written: what is read of them is bounded and checked before anything is made of it.

Every reader of recordings, and of other tools' files, reads through this package:

* `folder.Folder` opens regular files inside one directory, and no others; it never waits for one;
* `demands.parse` bounds the size, the depth and the numbers of a JSON text before it parses it;
* `demands` say in one place which keys and types a parsed text must have.

What is wrong ends in the error that the caller chose; by default a `CorruptRecordingError`.
"""
