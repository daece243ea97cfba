"""What a user asks for, composed from planner, profiler, simulator and schedules."""
