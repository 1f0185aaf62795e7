"""Recording the trainings of other libraries' trainers: one module for each library, which imports it."""
