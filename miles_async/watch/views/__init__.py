"""The data of each view of the page, as JSON: functions of a run."""
