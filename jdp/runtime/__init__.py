"""Host side: start processes, find each other, share small facts."""
