# frozen_string_literal: true

require_relative "../ruby/divided_models"

# What test/ruby/checkpoint_layouts_test.rb has, for all pairs of more forms.
class AllCheckpointLayoutsTest < Minitest::Test
  include DividedModels

  FORMS = DividedModels.forms("plain" => {}, "tp2" => {tp: 2}, "tp4" => {tp: 4}, "fsdp3" => {fsdp: 3}, "fsdp2_tp2" => {fsdp: 2, tp: 2},
    "fsdp2_dp2" => {fsdp: 2, dp: 2}, "dp2_tp2" => {dp: 2, tp: 2}, "zero2_tp2" => {zero: 2, tp: 2}, "pp2" => {pp: 2}, "pp2_tp2" => {pp: 2, tp: 2},
    "pp2_fsdp2" => {pp: 2, fsdp: 2}, "pp2_zero2" => {pp: 2, zero: 2})

  def test_any_form_goes_on_from_any_other
    Dir.mktmpdir do |dir|
      assert_equal [], world(4) { faults_of(dir, FORMS, FORMS.product(FORMS)) }.flatten
    end
  end
end
