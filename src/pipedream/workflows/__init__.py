"""What a user asks for, composed from planner, profiler, simulator and schedules: profile, plan, simulate, check, sweep,
probe. The phases of a training run are prepared here, too."""
