"""A transaction on the lineage, as functions of this package take it: SQLAlchemy's connection.

SQLAlchemy's own session comes with the ORM, whose import takes a third of the time that a terminal
command needs to start.
"""

from sqlalchemy import Connection

Session = Connection
