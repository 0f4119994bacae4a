"""Tests of other people's models: what they compile to, what happens when they run, a sanitizer. See docs/testing.md.

``plugin``     the plugin of pytest, loaded in each run where this package is installed: it imports nothing but pytest
``plans``      the fixture ``bcg_plan``
``snapshots``  texts in files beside the test, and what differs
``count``      the fixture ``bcg_counters``
"""
